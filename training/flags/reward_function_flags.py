"""The flags that say which functions score responses, and how much each part of the score counts."""

import re
from dataclasses import dataclass

from engine.errors import UserError
from training.flags.algorithm_flags import AlgorithmFlags
from training.flags.arguments import flag


@dataclass(kw_only=True)
class RewardFunctionFlags(AlgorithmFlags):
    """What the score of step 3 is made of, beside the reward model."""

    reward_function: list[str] = flag(
        [],
        "functions of your own, module:function or file.py:function, that are given prompts and responses as texts, "
        "and columns of the data, and return a number for each response; or RewardSource classes "
        "(docs/extending.md); or built-in ones: math_verify, format (docs/verifiable.md)",
        group="rewards",
    )
    reward_weights: list[float] = flag(
        [],
        "the weight of each function in the score, and then of the reward server, by default 1; one of weight 0 is "
        "measured alone. The reward model's is --reward_model_weight",
    )
    answer_column: str | None = flag(
        None, "the column with the right answers, for math_verify (pip install .[math]); by default answer"
    )
    response_format: str | None = flag(
        None,
        "the regular expression that whole responses have to match, for format; by default reasoning in <think> tags, "
        "and an answer in <answer> tags",
    )
    overlap_rewards: bool = flag(
        False,
        "call each function, from a thread of its own, and ask the reward server for responses that are done while "
        "others are still drawn; what it says of a response must not depend on the others, nor on the thread",
    )
    reward_model_weight: float = flag(1.0, "the reward model's weight in the score")
    length_penalty: float = flag(0.0, "subtracted from the score for each token of the response")

    def validate_functions(self) -> None:
        """Raise UserError for columns and forms that belong to no function, or are none."""
        self.finite("reward_model_weight", "length_penalty")
        functions = self.reward_function
        if len(set(functions)) < len(functions):
            twice = next(name for name in functions if functions.count(name) > 1)
            raise UserError(f"--reward_function {' '.join(functions)}: {twice} is given twice. Give it once.")
        if not self.other_rewards and self.overlap_rewards:
            raise UserError(
                "--overlap_rewards needs --reward_function or --reward_url: it is not for the reward model."
            )
        check_built_in(self)

    @classmethod
    def no_flag(cls, name: str, value: str) -> str | None:
        """Also for the name that --reward_weights had when there was one function."""
        return f"Give --reward_weights {value}." if name == "reward_function_weight" else super().no_flag(name, value)


def check_built_in(args) -> None:
    """Raise UserError for a column or a form that belongs to no function, or is none. args: flags with
    `reward_function`, `answer_column` and `response_format`."""
    for name, function in (("answer_column", "math_verify"), ("response_format", "format")):
        if getattr(args, name) is not None and function not in args.reward_function:
            raise UserError(f"--{name} {getattr(args, name)} needs --reward_function {function}.")
    try:
        re.compile(args.response_format or "")
    except re.error as error:
        raise UserError(
            f"--response_format {args.response_format}: is no regular expression ({error}). Mend it."
        ) from None
