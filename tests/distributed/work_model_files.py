"""Models loaded, asked and saved by engines, for tests that ask the same of one process and of several."""

from pathlib import Path
from unittest import mock

import torch

from engine.errors import SharedError
from engine.experience import position_ids
from engine.models.loading import load_policy, load_scorer, new_scorer
from engine.rlhf_engine import EngineSpec, frozen_model
from engine.zero.communication import init
from engine.zero.config import EngineConfig
from scripts.harness.models import PAD, make_tokenizer
from scripts.harness.weights import full_state
from training.runtime import model_folders

HEAD_SEED = 5


@torch.no_grad()
def what_they_say(
    stage: int,
    scorers: dict[str, str],
    actors: dict[str, str],
    sequences: torch.Tensor,
    attention_mask: torch.Tensor,
    fresh: tuple[str, str] | None = None,
) -> dict:
    """Sequence scores and full weights of reward models, log-probs of language models, by their names.

    fresh: (language model, folder): a new reward model is made of the one and saved in the other.
    """
    init()
    spec, choice = EngineSpec(actor_path="", critic_path=""), EngineConfig("reward", stage)
    inputs, said = (sequences, attention_mask, position_ids(attention_mask)), {}
    for name, path in scorers.items():
        model = frozen_model(load_scorer, path, choice, spec)
        scores = model.module.sequence_scores(model(*inputs), sequences, attention_mask)
        said[name] = scores, full_state(model.module.model)
    for name, path in actors.items():
        said[name], _ = frozen_model(load_policy, path, choice, spec)(*inputs, response_length=sequences.shape[1] - 1)
    if fresh is not None:
        model = frozen_model(_new_scorer, fresh[0], choice, spec)
        folder = Path(fresh[1])
        model_folders.save(model, make_tokenizer(), folder.parent, folder.name)
    return said


def _new_scorer(path, dtype, ds_config, what, **how):
    return new_scorer(path, dtype, PAD, HEAD_SEED, ds_config, what, **how)


def second_verdicts(stages: tuple[int, ...], folders: dict[str, str]) -> dict[int, dict[str, str]]:
    """By stage and name, what loading a damaged language model says where its headers were not looked at beforehand."""
    init()
    spec = EngineSpec(actor_path="", critic_path="")
    with mock.patch("engine.models.checking.check_weights"):
        return {
            stage: {name: verdict(path, EngineConfig("reward", stage), spec) for name, path in folders.items()}
            for stage in stages
        }


def verdict(path: str, choice: EngineConfig, spec: EngineSpec) -> str:
    try:
        frozen_model(load_policy, path, choice, spec)
    except SharedError as error:
        return str(error)
    return "it was loaded"


def verdicts(path: str, stage: int, config: str) -> dict[str, str | bool]:
    """What is said of the model at `path`: as it is loaded; with its head and embedding tied; and whether random
    numbers go on as they would."""
    loaded = path, EngineConfig("reward", stage, path=config), EngineSpec(actor_path="", critic_path="")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    found: dict[str, str | bool] = {"as it is": verdict(*loaded)}
    found["random numbers"] = torch.equal(torch.rand(3), expected)
    with mock.patch("engine.models.config_and_tokenizer.has_own_head", return_value=False):
        found["by weights"] = verdict(*loaded)
    return found
