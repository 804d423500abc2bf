"""What the responses have become: their length, their end, their variety."""

from collections.abc import Mapping, Sequence

from training.reporting.health.curves import ALARM, LOOK, NOISE, SHARE, Finding, at_end, at_start, column, having

LONGER, SHORTER = 1.5, 0.67
"""Response length, end over start. Reward models like length (or its absence) for its own sake."""
FEW_ENDED = 0.1
"""Share of responses that end by themselves; below it nearly all are cut off at the limit, and scored unfinished."""
ENDED_KEPT = 0.6
"""Share of that at the start. Half as many is a change of habit; a little above half, so that 0.40 to 0.20 is told
whichever way its noise falls."""
MANY_CLIPPED, ALL_CLIPPED = 0.1, 0.9
"""Share of scores beyond the clip, at the end. A clip is for outliers; where all are beyond it, all count alike."""
DEGENERATE = 0.01
"""Share of responses masked out for being too short: a few are accidents, one in a hundred is a habit."""
NO_DIFFERENCE = 0.5
"""Share of groups whose responses all score the same, at the end: with more, most of what was drawn teaches nothing."""
ALIKE = 0.5
"""Distinct bigrams and compressed bytes, a token of the held-out responses, end over start: below it in both, they have
become one response. Policies that learn honestly keep 0.8 of the bytes, and collapsed ones 0.1 to 0.25."""
TOO_SHORT = 0.33
"""Length, end over start, below which responses have no room to differ: it is their length that is ill."""
INVENTED = 0.05
"""Rise in the share of new words. A small model with 20 % non-words had 34 % new ones; trained well it had 27 % (16 %
non-words), trained to invent 46 %, then 57 % (31 %, 40 %): new words count non-words about one for one. Learning to say
other things cost 1 in a hundred at most."""


def length_grew(rows: Sequence[Mapping]) -> Finding | None:
    """Length, as the reward model's back door."""
    first, last = _lengths(rows)
    if first is None or last <= LONGER * first:
        return None
    return Finding(
        LOOK,
        f"responses grew from {first:.3g} to {last:.3g} tokens",
        "See in samples/ whether the reward model pays for length alone. If so, balance lengths among its training "
        "pairs, try --length_penalty, or raise --kl_coef.",
    )


def length_shrank(rows: Sequence[Mapping]) -> Finding | None:
    """Silence, as the reward model's back door."""
    first, last = _lengths(rows)
    if first is None or last >= SHORTER * first:
        return None
    return Finding(
        LOOK,
        f"responses shrank from {first:.3g} to {last:.3g} tokens",
        "See in samples/ whether the reward model pays for brevity alone. If so, balance lengths among its training "
        "pairs, or raise --kl_coef.",
    )


def _lengths(rows: Sequence[Mapping]) -> tuple[float | None, float | None]:
    """Tokens a response, at the start and at the end."""
    # The held-out prompts are the same each time, and their first answers come from before any training.
    name = "eval/response_length" if len(having(rows, "eval/response_length")) > 1 else "rollout/response_length"
    return at_start(rows, name), at_end(rows, name)


def few_ever_ended(rows: Sequence[Mapping]) -> Finding | None:
    """Responses nearly all of which the limit cuts off, from the first step on: no trend, one step shows it."""
    first, last = at_start(rows, "rollout/eos_rate"), at_end(rows, "rollout/eos_rate")
    if last is None or max(first, last) >= FEW_ENDED:
        return None
    return Finding(
        LOOK,
        f"{last:.0%} of responses ended by themselves at the end, the others hit the limit",
        "They did not from the start: raise --max_answer_seq_len, and see that the SFT data ends with EOS.",
    )


def few_ended(rows: Sequence[Mapping]) -> Finding | None:
    """Responses that the limit cuts off, which it did not at the start: nearly all, or far more."""
    first, last = at_start(rows, "rollout/eos_rate"), at_end(rows, "rollout/eos_rate")
    if last is None or first < FEW_ENDED or (last >= FEW_ENDED and not _halved(rows, first, last)):
        return None
    return Finding(
        LOOK,
        f"{last:.0%} of responses ended by themselves at the end, the others hit the limit",
        f"At the start {first:.0%} did: see in samples/ whether the reward model pays for going on; raise "
        "--max_answer_seq_len, or try --missing_eos_penalty.",
    )


def _halved(rows: Sequence[Mapping], first: float, last: float) -> bool:
    """Whether the share that ended fell to half, or nearly, and by more than the noise of so many responses."""
    present = having(rows, "rollout/eos_rate")
    responses = present[-1]["samples"] / present[-1]["step"] * max(1, int(SHARE * len(present)))
    error = ((first * (1 - first) + last * (1 - last)) / responses) ** 0.5
    return last < ENDED_KEPT * first and first - last > NOISE * error


def degenerate(rows: Sequence[Mapping]) -> Finding | None:
    """Responses that were masked out."""
    count, seen = sum(column(rows, "rollout/degenerate")), rows[-1]["samples"]
    if count == 0 or count < DEGENERATE * seen:
        return None
    return Finding(
        LOOK,
        f"{count:.0f} responses ({count / seen:.1%}) were degenerate, too short to learn from",
        "See in samples/ whether the reward model pays for silence; with pad equal to EOS, look at the "
        "dialect's length_rule.",
    )


def groups_alike(rows: Sequence[Mapping]) -> Finding | None:
    """Groups of responses to one prompt that have the same score, so that none is better than the others."""
    last = at_end(rows, "rollout/groups_alike")
    if last is None or last <= NO_DIFFERENCE:
        return None
    others = "take other prompts, or more responses to each (--num_samples_per_prompt)"
    if not having(rows, "rollout/batches_drawn"):
        others = f"--set dynamic_sampling=10 draws for further prompts in their place; or {others}"
    return Finding(
        LOOK,
        f"in {last:.0%} of the groups at the end all responses scored the same, and comparing them taught nothing",
        f"By objective/scores see whether the prompts are solved or too hard; {others}.",
    )


def answers_alike(rows: Sequence[Mapping]) -> Finding | None:
    """Held-out responses, first and last: how many different pairs of words they hold, and what they compress to."""
    evaluations = [row for row in having(rows, "eval/distinct_bigrams") if row.get("eval/response_length", 0.0) > 0]
    if len(evaluations) < 2:
        return None
    first, last = evaluations[0], evaluations[-1]
    length = last["eval/response_length"] / first["eval/response_length"]
    bigrams = last["eval/distinct_bigrams"] / max(first["eval/distinct_bigrams"], 1.0) / length
    compressed = _kept(first, last, "eval/compressed_bytes")
    # Longer texts hold fewer new pairs for their length, and plainer words compress better: what is alike does both.
    if max(bigrams, compressed) >= ALIKE or length < TOO_SHORT:
        return None
    return Finding(
        LOOK,
        f"held-out responses became alike: {first['eval/distinct_bigrams']:.0f} distinct bigrams before, "
        f"{last['eval/distinct_bigrams']:.0f} after, {bigrams:.0%} for their length"
        + (f"; compressed together they take {compressed:.0%} of the bytes a token" if compressed else ""),
        "Read samples/; raise --kl_coef, lower --actor_learning_rate, or stop earlier.",
    )


def _kept(first: Mapping, last: Mapping, name: str) -> float:
    """The share of a metric that is left; 0 where it was not measured."""
    return last[name] / first[name] if name in last and first.get(name, 0.0) > 0.0 else 0.0


def words_invented(rows: Sequence[Mapping]) -> Finding | None:
    """Words that the policy did not use before training: it learns some, it does not need many."""
    evaluations = having(rows, "eval/new_words")
    if len(evaluations) < 2:
        return None
    first, last = (evaluations[place]["eval/new_words"] for place in (0, -1))
    error = evaluations[-1].get("eval/new_words_change_se", 0.0)
    if last - first <= max(INVENTED, NOISE * error):
        return None
    return Finding(
        LOOK,
        f"words are being invented, or new to the policy: {last:.0%} of a held-out response's words stood in no other "
        f"response before training, and in no prompt; before it was {first:.0%}",
        "Read samples/: if they are no words, the score pays for noise that the reward model has never seen; raise "
        "--kl_coef, lower --actor_learning_rate, or mix language in (--unsupervised_dataset_name).",
    )


def scores_clipped(rows: Sequence[Mapping]) -> Finding | None:
    """Scores on a scale that the clip is not made for."""
    share = at_end(rows, "objective/clipped")
    if share is None or share <= MANY_CLIPPED:
        return None
    return Finding(
        ALARM if share > ALL_CLIPPED else LOOK,
        f"{share:.0%} of the scores at the end were beyond score_clip and counted as that, so that they do not differ",
        "Have the reward function, server or model give smaller numbers, --set score_scaling=running, or --set "
        "score_clip=none.",
    )
