"""Which token fills the slots after a response: each system's own rule, the field `pad_token` of its dialect.

A system that takes `ids != pad` for what is real cannot tell EOS from padding where EOS pads. It then does not learn
EOS, and reads the score one token earlier, so the rule belongs to what the system computes.
"""

from engine.algorithms.dialect import Dialect

ADDED = "[PAD]"


def set_pad_token(tokenizer, rule: str, path: str, room: bool) -> None:
    """Give the tokenizer of the language model at `path` the pad token of a rule; EOS where the rule finds none.

    Args:
        rule: "tokenizer": the tokenizer's own.
            "never_eos": its own, unless that is EOS or there is none: then "[PAD]" is added, if there is room.
            "padding": its own; where there is none "<|padding|>", or what the tokenizer takes for that text: its
            unknown token, which is EOS for GPT-2.
            "eos": EOS.
            "eos_unless_llama": EOS; but if the model has "llama" in its name, the tokenizer's own; where there is none
            "[PAD]" is added, if there is room.
        room: whether the model has a row of its embedding to spare for a token that is added.

    Sources: microsoft/DeepSpeedExamples 83757d9c, dschat/utils/utils.py, `get_tokenizer` ("eos_unless_llama");
    vwxyzjn/summarize_from_feedback_details ee77a9ab, ppo.py, and huggingface/trl f2cd5771, examples/scripts/ppo/ppo.py,
    which add "[PAD]" ("never_eos"); CarperAI/trlx 3340c2f3, trainer/accelerate_base_trainer.py ("padding").
    """
    own, eos = tokenizer.pad_token, tokenizer.eos_token
    if rule == "eos" or (rule == "eos_unless_llama" and "llama" not in path):
        tokenizer.pad_token = eos or own
    elif (rule == "never_eos" and own == eos) or (rule in ("never_eos", "eos_unless_llama") and own is None):
        if room:
            tokenizer.add_special_tokens({"pad_token": ADDED})
    elif rule == "padding" and own is None:
        tokenizer.pad_token_id = tokenizer.convert_tokens_to_ids("<|padding|>")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = eos


def classifier_pad_token_id(tokenizer) -> int | None:
    """The pad token of a new classifier's configuration: None where it doubles as EOS, so that Hugging Face's own
    pooling cannot take a final EOS for padding."""
    return None if tokenizer.pad_token_id == tokenizer.eos_token_id else tokenizer.pad_token_id


def pad_token_line(tokenizer, dialect: Dialect, path: str) -> str:
    """What a run says of its pad token; "" where nothing that the dialect computes depends on it."""
    if dialect.length_rule not in ("not_pad", "before_pad"):
        return ""
    line = f"pad token {tokenizer.pad_token!r}"
    if tokenizer.pad_token != tokenizer.eos_token:
        return line
    why = "the dialect's system cannot tell it from padding"
    if dialect.pad_token == "never_eos":
        why = f"the model has no row for {ADDED!r}, which the dialect's system adds"
    elif dialect.pad_token == "eos_unless_llama" and "llama" in path:
        why = f"the tokenizer's own, or the model has no row for {ADDED!r}, which the dialect's system adds"
    return f"{line}, which is EOS ({why}): EOS is not learned"
