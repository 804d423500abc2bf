"""The grammar of the built-in film reviews. It draws texts, and makes regular expressions that recognise them.

    " ".join(derive(random.Random(0), "response", "+"))        # the words of a positive response
    re.fullmatch(pattern("response", "+"), text + " ")         # whether a text is a positive response

`derive` and `pattern` are both computed from `GRAMMAR`.

Single words do not show the sentiment: a third of the opinions negate a word of the opposite sentiment ("never dull",
"nobody should skip it"), so positive and negative reviews have the same words. Most of a text says who saw the film,
where, when, and which part of it; a prompt says nothing else. Therefore a policy can become positive and keep its
variety.
"""

import random
import re
from functools import cache

# One line per symbol, with equally likely alternatives between bars. A symbol with a sign has one line per sentiment.
# `<x>` keeps the sentiment of the text around it, `<~x>` reverses it. There is no recursion, and apart from the
# sentiment each choice depends on its neighbours only, so a small model can learn the grammar.
GRAMMAR = """
prompt     = Review : <viewer> <watched> <this> <genre> | Review : <viewer> <watched> <this> <origin> <genre>
viewer     = i | we | they | some | many | families | my sister | my brother
watched    = saw | watched | caught | rented | streamed | chose | finished | tried
this       = this | a | another
genre      = thriller | western | comedy | drama | musical | romance | mystery | documentary | cartoon | sequel | remake
origin     = french | korean | spanish | british | recent | silent | long | short

response   = <scene> , and <claim> . | <scene> , and <claim> <extent> . | , and <claim> <extent> .
           | <scene> , and <claim> <more> .
scene      = <company> | <place> | <time> | <company> <time> | <place> <time>
company    = with friends | with <my> <aunt> | with <two> <guests>
my         = my | our | her | his
aunt       = aunt | uncle | father | mother | cousin | neighbour | teacher | daughter | son
two        = two | three | four | several
guests     = strangers | colleagues | classmates | tourists | students
place      = at home | at the <cinema> | in <town> | on <a> <train>
cinema     = cinema | theatre | festival | library | school | museum | club
town       = london | dublin | boston | lisbon | oslo | vienna | prague | chicago | toronto
a          = a | the
train      = train | plane | ferry | bus
time       = last <month> | one <evening> | on <friday> | <after> <dinner>
month      = week | month | spring | summer | winter | autumn
evening    = evening | morning | afternoon | night
friday     = monday | tuesday | wednesday | thursday | friday | saturday | sunday
after      = after | before
dinner     = dinner | work | lunch | class | midnight

claim      = <subject> <predicate>
more       = and <predicate> | while <subject> <predicate> | so <advice> | and <predicate> so <advice>
subject    = it | the film | the <first> <half> | the <music> | the <music> by <anna> <lee>
first      = first | second | final | opening | middle
half       = half | act | hour | scene | part
music      = music | script | story | editing | acting | casting | design
anna       = anna | tom | maria | james | nina | peter | ruth | omar | helen | victor | clara | hugo
lee        = lee | reed | stone | novak | weber | silva | brown | moreau | tanaka | olsen | costa | grant
extent     = from start to finish | in every scene | for two hours | at every turn | to the very end | most of the time

opinion    = <predicate> | <advice>
predicate  = <was> <judgement> | <was> <judgement> | had <merit> | <did>
judgement  = <clever> | <quite> <clever> | <compared> | <never> <~clever>
compared   = as <clever> as <usual> | more <clever> than <usual> | less <~clever> than <usual>
merit      = <charm> | <plenty> <charm> | <no> <~charm>
did        = <moved> <us> | <quite> <moved> <us> | <never> <~moved> <us>
was        = was | felt | seemed | looked | stayed | remained | became
quite      = quite | really | truly | rather | simply | deeply
usual      = usual | expected | before | most | others
never      = never | hardly | rarely | barely
plenty     = plenty of | lots of | so much | enough
no         = no | little | hardly any | not much
us         = us | me | everyone | viewers | critics
advice     = you should <see> it | anyone should <see> it | everyone should <see> it | nobody should <~see> it

clever+    = clever | funny | gripping | fresh | charming | tender | honest | vivid | elegant | lively
clever-    = dull | boring | clumsy | shallow | noisy | bland | tired | flat | messy | hollow
charm+     = charm | wit | heart | warmth | energy | grace
charm-     = noise | filler | clutter | gloom | nonsense | padding
moved+     = moved | delighted | amused | impressed | surprised | touched
moved-     = bored | annoyed | confused | irritated | disappointed | exhausted
see+       = see | catch | watch | find
see-       = skip | avoid | leave | miss
"""

EITHER = ""  # the sign of texts in which each opinion may have either sentiment
_OPPOSITE = {"+": "-", "-": "+", EITHER: EITHER}


def _read_grammar(text: str) -> dict[str, list[list[str]]]:
    """{symbol: its alternatives}, each a list of words and references. A line that begins with a bar continues the line
    before it."""
    rules = {}
    for line in re.sub(r"\n\s*\|", " |", text).split("\n"):
        if line:
            symbol, alternatives = line.split(" = ")
            rules[symbol.strip()] = [alternative.split() for alternative in alternatives.split("|")]
    return rules


_RULES = _read_grammar(GRAMMAR)


def _reference(item: str, sign: str) -> tuple[str, str] | None:
    """The symbol and sentiment that `item` refers to in a text of sentiment `sign`; None for a plain word."""
    if not item.startswith("<"):
        return None
    symbol = item.strip("<>")
    return (symbol[1:], _OPPOSITE[sign]) if symbol.startswith("~") else (symbol, sign)


def _alternatives(symbol: str, sign: str) -> list[list[str]]:
    if symbol in _RULES:
        return _RULES[symbol]
    return [items for s in (sign or "+-") for items in _RULES[symbol + s]]


def derive(rng: random.Random, symbol: str, sign: str) -> list[str]:
    """The words of one random text of `symbol` with the sentiment `sign`."""
    words = []
    for item in rng.choice(_alternatives(symbol, sign)):
        reference = _reference(item, sign)
        words += derive(rng, *reference) if reference else [item]
    return words


@cache
def pattern(symbol: str, sign: str) -> str:
    """A regular expression that matches all texts of `symbol` with the sentiment `sign`, with a space after every
    word."""

    def item_pattern(item: str) -> str:
        reference = _reference(item, sign)
        return pattern(*reference) if reference else re.escape(item) + " "

    return f"(?:{'|'.join(''.join(map(item_pattern, items)) for items in _alternatives(symbol, sign))})"
