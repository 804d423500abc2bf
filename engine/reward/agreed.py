"""Scores that fail on all ranks or on none.

reward = AgreedReward.made(RewardServer, tokenizer, "--reward_function extensions.py:RewardServer")
"""

import contextlib
import math
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from engine import distributed
from engine.errors import RunStopped, shortened
from engine.experience import Rollout
from engine.reward.base import TAKEN, RewardSource

ALONE = 60.0  # seconds after which a failure is told that the other ranks have not come to hear of


class AgreedReward(RewardSource):
    """A source of the user's; what it raises on one rank stops the run on all, before any weight changes.

    name: how messages call the source.
    """

    def __init__(self, source: RewardSource, name: str):
        self.source, self.name = source, name

    @classmethod
    def made(cls, source: Callable[[Any], RewardSource], tokenizer, name: str) -> "AgreedReward":
        """Make the source of the tokenizer; raises RunStopped on all ranks where that fails on one."""
        made = problem = None
        try:
            made = source(tokenizer)
        except RunStopped:
            raise  # on all ranks
        except BaseException as error:  # whatever the user's code raises, sys.exit too
            problem = f"raised {described(error)} as it was made"
        stop_together(problem, name, "It is made of the tokenizer, once on each rank. Mend it.")
        assert made is not None
        return cls(made, name)

    def score(self, rollout: Rollout) -> Tensor:
        """(B,) float32, as the source gives them; raises RunStopped on all ranks where it fails on one."""
        return self._agreed(self.source.score, rollout)["scores"]

    def parts(self, rollout: Rollout) -> dict[str, Tensor]:
        """What adds up to the score, as the source has it; raises RunStopped on all ranks where it fails on one."""
        whole = type(self.source).parts is RewardSource.parts
        return self._agreed(self.source.score if whole else self.source.parts, rollout)

    def weights(self) -> Mapping[str, float]:
        """The source's own."""
        return self.source.weights()

    def prepare(self, rollout: Rollout) -> None:
        """The source's own, if it has one; raises RunStopped on all ranks where it fails on one."""
        if type(self.source).prepare is RewardSource.prepare:
            return
        problem = None
        try:
            self.source.prepare(rollout)
        except BaseException as error:  # whatever the user's code raises, sys.exit too
            problem = f"raised {described(error)}"
        stop_together(problem, self.name, "It is told which responses come next. Mend it.")

    def on_device(self) -> contextlib.AbstractContextManager:
        """The source's own."""
        return self.source.on_device()

    def _agreed(self, call: Callable, rollout: Rollout) -> dict[str, Tensor]:
        parts: dict[str, Tensor] = {}
        problem = None
        try:
            returned = call(rollout)
            parts = returned if isinstance(returned, dict) else {"scores": returned}
            problem = _misshapen(parts, len(rollout))
        except RunStopped:
            raise  # on all ranks
        except BaseException as error:  # whatever the user's code raises, sys.exit too
            problem = f"raised {described(error)}"
        stop_together(problem, self.name, "Its score gives one number a response, a tensor (B,). Mend it.")
        return {name: values.float() for name, values in parts.items()}


def _misshapen(parts: dict, count: int) -> str | None:
    for name, values in parts.items():
        if name in TAKEN or (name == "scores" and len(parts) > 1):
            return f"calls a part of its score {name!r}, which is the name of something else that is measured"
        if not isinstance(values, Tensor):
            return f"returned {shortened(values)}, which is no tensor"
        if values.shape != torch.Size([count]):
            return f"returned a tensor of shape {tuple(values.shape)} for {count} responses"
    return None if parts else "returned nothing"


def stop_together(problem: str | None, name: str, contract: str) -> None:
    """Raise RunStopped on all ranks where one has a problem with the user's code (all ranks call this).

    Where the others do not come, because the user's code calls them together itself, this rank's problem is told alone.
    """
    alone = threading.Timer(ALONE, print, [f"rank {distributed.rank()}: {name} {problem}. The others are waited for."])
    alone.daemon = True
    if problem is not None:
        alone.start()
    try:
        problems = [text for text in distributed.all_gather_objects(problem) if text is not None]
    finally:
        alone.cancel()
    if problems:
        raise RunStopped(f"{name} {problems[0]}. {contract}", good_until=math.inf)


def described(error: BaseException) -> str:
    """What the user's code raised, with the deepest line of the file that was called; for the place of the call."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the call
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    place = f" ({own[-1].filename}, line {own[-1].lineno}: {own[-1].line})" if own else ""
    return f"{type(error).__name__}: {str(error)[:300]}{place}"
