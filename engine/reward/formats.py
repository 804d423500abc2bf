"""A reward for responses of a given form: --reward_function format, with --response_format for another form.

Format()(prompts, ["<think>12 and 30</think><answer>42</answer>", "42"])      # [1.0, 0.0]
"""

import re

_INSIDE = r"(?:(?!</?(?:think|answer)>).)*"  # anything but another of the tags: nested and repeated ones are refused
THINK_ANSWER = rf"\s*<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>\s*"
"""Reasoning and an answer, each in its tags, once and in this order, and nothing beside them but white space.

Source: the format reward of DeepSeek-R1 (Guo et al. 2025, section 2.2.2 and table 1)."""


class Format:
    """1 where the whole response matches a regular expression, whose dot matches line breaks too, else 0.

    Raises: re.error for what is no regular expression.
    """

    def __init__(self, pattern: str = THINK_ANSWER):
        self.pattern = re.compile(pattern, re.DOTALL)

    def __call__(self, prompts: list[str], responses: list[str]) -> list[float]:
        """One number a response."""
        return [float(self.pattern.fullmatch(response) is not None) for response in responses]
