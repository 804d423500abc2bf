"""Run by ranks: models loaded as a faulty loader would have them, and what is said of these."""

from unittest import mock

import torch

from engine.errors import SharedError
from engine.models.loading import load_policy
from engine.rlhf_engine import EngineSpec, frozen_model
from engine.zero.config import EngineConfig


def verdicts(path: str, stage: int, config: str) -> dict[str, str | bool]:
    """What is said of the model at `path`: as it is loaded; with its head and embedding tied; and whether random
    numbers go on as they would."""
    choice, spec = EngineConfig("reward", stage, path=config), EngineSpec(actor_path="", critic_path="")

    def said() -> str:
        try:
            frozen_model(load_policy, path, choice, spec)
        except SharedError as error:
            return str(error)
        return "it was loaded"

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    found: dict[str, str | bool] = {"as it is": said(), "random numbers": torch.equal(torch.rand(3), expected)}
    with mock.patch("engine.models.config_and_tokenizer.has_own_head", return_value=False):
        found["by weights"] = said()
    return found
