"""What the plan says of steps 1 and 2, which train one model, over several passes; against arithmetic by hand."""

import pytest

from engine.engine_spec import OptimizerSpec
from engine.memory import Cluster
from engine.memory.gpus import reserved
from engine.memory.planning import OneModel, plan_one_model
from engine.memory.zero_memory import Bytes
from engine.zero.config import EngineConfig
from tests.engine.memory.configurations import POLICY, SCORER, llama

WHOLE = {False: 2 * POLICY, True: 2 * SCORER}  # bytes in 16 bits


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return llama(tmp_path_factory.mktemp("llama"))


def training(path: str, scorer: bool, passes: int, gpu: int | None = None) -> dict[str, Bytes]:
    """The device's bytes at the moments of training, on two GPUs."""
    one = OneModel(
        path=path,
        scorer=scorer,
        engine=EngineConfig("model", 3),
        optimizer=OptimizerSpec(lr=1e-5),
        dtype="bf16",
        rows=2,
        length=24,
        passes=passes,
    )
    planned = plan_one_model(one, Cluster(gpus=2, gpu=gpu))
    return {moment.name: moment.device for moment in planned.moments if moment.phase == "train"}


@pytest.mark.parametrize("scorer", [False, True])
def test_over_several_passes_weights_and_gradients_are_whole(path, scorer):
    once, several = training(path, scorer, 1), training(path, scorer, 4)
    share, whole = WHOLE[scorer] / 2, WHOLE[scorer]
    assert several["the backward pass"].of_kind("gathered") == several["gradients are reduced"].of_kind("gathered")
    assert several["the backward pass"].of_kind("gathered") == whole
    assert several["the backward pass"].of_kind("gradients") == pytest.approx(share + whole, rel=0.001)
    assert several["gradients are reduced"].of_kind("gradients") == pytest.approx(share, rel=0.001)
    assert several["the first pass"].by_role == once["the backward pass"].by_role
    assert once["gradients are reduced"].of_kind("gathered") == 0 and "the first pass" not in once


def test_nothing_is_kept_whole_where_memory_does_not_allow_it(path):
    """The GPU has what would be needed, less weights and gradients."""
    needed = max(device.total for device in training(path, False, 4).values())
    assert training(path, False, 4, reserved(2) + needed - 2 * WHOLE[False]).keys() == training(path, False, 1).keys()
