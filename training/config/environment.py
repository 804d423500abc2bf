"""The flags of environments, which answer between the turns of a response. Step 3 and measuring programs share them."""

from dataclasses import dataclass

from training.config.flags import RunFlags, flag


@dataclass(kw_only=True)
class EnvironmentFlags(RunFlags):
    """The flags that name an environment and limit its conversations."""

    environment: str | None = flag(
        None,
        "class that answers between turns, as file.py:Class or module:Class (docs/environments.md): with step(turn), "
        "or with tools, as TRL's environment_factory takes it. Only the tokens that the model draws are learned; the "
        "environment's rewards are a part of the score",
        group="environments",
    )
    max_turns: int = flag(8, "most turns of a response", least=1, only_with="environment")
    max_turn_tokens: int | None = flag(
        None,
        "most tokens of a turn; a turn that is cut off is the last one. By default only --max_answer_seq_len counts, "
        "which holds all turns and what the environment says",
        least=1,
        only_with="environment",
    )
    environment_timeout: float = flag(
        60.0,
        "seconds that an environment has to begin, for each answer, and to end; a late one ends its response",
        above=0,
        only_with="environment",
    )
    environment_threads: int = flag(
        32, "environments that each rank asks at the same time, in threads", least=1, only_with="environment"
    )
    response_template: str | None = flag(
        None,
        "how tool calls are written: llama, qwen, qwen3.5, or a JSON file as transformers' parse_response reads it; by "
        "default the tokenizer's own template",
        only_with="environment",
    )
