"""What only an accelerator would show of a step, counted on a second device in Python: no operation mixes devices, no
collective call is given a tensor on the CPU, and the host waits and sends as often as it has to
(tests/engine/zero/second_device.py).

Stage 3 is left out: where DeepSpeed puts what it partitions cannot be told of this device.
"""

from collections import Counter
from typing import NamedTuple

import pytest

from engine.models.attention import Attention
from engine.models.lora import LoraSpec
from scripts.harness.models import make_adapter, make_family
from scripts.harness.ranks import run_ranks

LORA = LoraSpec(dim=4, alpha=8, lr=2e-3, only=True)


class Family(NamedTuple):
    """A model type with these fields of its configuration, and how often transformers asks the host whether a mask
    hides anything: in a pass over prompts of 5 tokens, over rows of 17, and never over a single token."""

    model_type: str
    changes: dict
    prompts: int
    rows: int


# It asks once for each kind of layers, but not where a window is full of keys, nor where masks are added to scores.
FAMILIES = {
    "all positions": Family("llama", {}, 1, 1),
    "windows of 8": Family("mistral", {}, 1, 0),
    "windows longer than rows": Family("mistral", {"sliding_window": 64}, 1, 1),
    "windows in every other layer": Family("gemma3_text", {}, 2, 1),
    "windows in the last layers": Family(
        "qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, 2, 1
    ),
    "windows in masks that are added": Family("gemma2", {}, 0, 0),
}


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> dict[str, str]:
    folders = {name: tmp_path_factory.mktemp(family.model_type) for name, family in FAMILIES.items()}
    for name, family in FAMILIES.items():
        make_family(family.model_type, folders[name], **family.changes)
    return {name: str(folder) for name, folder in folders.items()}


def test_the_sampler_waits_once_in_8_tokens(families):
    """The first token comes with the prompts, so that 9 and 17 are drawn in 1 and 2 rounds. Beside them it asks for the
    prompts' lengths, and transformers whether a mask hides anything."""
    [found] = run_ranks("tests.distributed.work_second_device:samplers", world=1, folders=families, lengths=[9, 17])
    for (name, decoding), (shorter, longer) in found.items():
        for rounds, seen in ((1, shorter), (2, longer)):
            waits = {
                "engine/rollout/decode.py _Loop._draw": rounds,
                "engine/rollout/passes.py Passes._forward": FAMILIES[name].prompts,
                "engine/rollout/request.py requests_of": 1,
            }
            assert (name, seen["ran"], seen["waits"]) == (name, decoding, Counter(waits))
            assert not seen["mixed"] and not seen["collectives"]
            assert seen["copies"] == {
                "engine/rollout/decode.py _Loop._draw": rounds,  # rows, lengths and tokens drawn, in one
                "engine/rollout/decode.py _Loop._join": 1,  # rows that begin
                "engine/rollout/request.py Draws.__init__": 1,  # what is never drawn
                "engine/rollout/request.py rollout_of": 3,  # tokens, lengths, which have ended
            }


def test_the_rows_that_move_are_sent_once():
    [seen] = run_ranks("tests.distributed.work_second_device:a_row_that_moves", world=1)
    assert seen["copies"] == {"engine/rollout/cache.py Batch.move": 1} and not seen["mixed"] and not seen["waits"]


# Of their second step, for 8 responses of 12 tokens a rank in micro-batches of 4, at stage 0 with at most
# two epochs, mini-batches and responses to a prompt. U: updates; M: models that are updated.
DIALECTS = ["default", "trlx", "trl_rloo", "dapo"]
WAITS = {
    # names of metrics, their sizes
    "engine/distributed.py all_gather_objects": [2, 2, 2, 6],
    # U * (M + 2) + M + 2: overflow, losses, passes; weights, experience, passes
    "engine/distributed.py largest": [12, 20, 9, 10],
    # widths, of each micro-batch of experience and of each update, and of its own where lengths differ
    "engine/experience.py Rollout.select": [11, 12, 11, 16],
    # tokens of which there are two log-probs
    "engine/experience_maker.py _log_ratios": [1, 1, 1, 1],
    # transformers: whether a mask hides anything, once a padded pass
    "engine/models/policy.py Backbone.hidden_states": [15, 16, 9, 8],
    # lengths, to divide rows by
    "engine/packing.py micro_batches": [3, 1, 1, 4],
    # once in 8 tokens
    "engine/rollout/decode.py _Loop._draw": [2, 2, 2, 2],
    # prompts' lengths
    "engine/rollout/request.py requests_of": [1, 1, 1, 1],
    # U * M: the gradient's norm
    "engine/zero/stages.py Stage0.step": [4, 8, 2, 2],
    # which groups score alike
    "training/group_sampling.py GroupSampler._groups": [0, 0, 0, 1],
    # U: tokens of all ranks
    "training/learner.py Learner._loss_weights": [2, 4, 2, 2],
    # KL
    "training/ppo_trainer.py mean_kls": [1, 1, 1, 1],
    # sums, extremes
    "training/reporting/metrics.py Accumulator.reduce": [2, 2, 2, 2],
}
COPIES = {
    # U + 1: numbers of passes
    "engine/distributed.py largest": [3, 5, 3, 4],
    # its four tensors
    "engine/experience.py PromptBatch.to": [4, 4, 4, 4],
    # lengths, to divide rows by
    "engine/packing.py micro_batches": [3, 1, 1, 4],
    # once in 8 tokens
    "engine/rollout/decode.py _Loop._draw": [2, 2, 2, 2],
    # rows that begin
    "engine/rollout/decode.py _Loop._join": [1, 1, 1, 1],
    # tokens, lengths, which have ended
    "engine/rollout/request.py rollout_of": [3, 3, 3, 3],
    # what is never drawn
    "engine/rollout/request.py Draws.__init__": [1, 1, 1, 1],
    # 2 * U * M: DeepSpeed's clipping
    "engine/zero/stages.py Stage0.step": [8, 16, 4, 4],
    # U: which rows
    "training/learner.py mini_batch_rows": [2, 4, 2, 2],
    # metrics that are numbers of the host
    "training/reporting/metrics.py Accumulator._flat": [26, 26, 23, 28],
}


RUNS = [("all positions", name) for name in DIALECTS] + [(name, "default") for name in FAMILIES][1:]


@pytest.fixture(scope="module")
def steps(families) -> dict[tuple[str, str], dict]:
    runs = [(families[family], dialect) for family, dialect in RUNS]
    return dict(zip(RUNS, run_ranks("tests.distributed.work_second_device:steps", world=1, runs=runs)[0]))


def test_every_step_keeps_to_its_device(steps):
    for found in steps.values():
        assert not found["mixed"] and not found["collectives"]


def test_a_step_computes_what_it_does_on_a_cpu(steps):
    """Within the rounding of fp32: attention is another kernel there, and the CPU's decoding is recorded."""
    for found in steps.values():
        for metrics in (found["metrics"], found["on_cpu"]):
            metrics.pop("value/explained_outcome", None)  # divides by a variance, near 0 where no response has its end
    near = {run: pytest.approx(found["on_cpu"], rel=1e-5, abs=1e-5) for run, found in steps.items()}
    assert {run: found["metrics"] for run, found in steps.items() if found["metrics"] != near[run]} == {}


@pytest.mark.parametrize("kind, table", [("waits", WAITS), ("copies", COPIES)])
def test_a_step_waits_and_sends_no_more_than_it_has_to(steps, kind, table):
    for (name, dialect), found in steps.items():
        expected = Counter({place: numbers[DIALECTS.index(dialect)] for place, numbers in table.items()})
        if kind == "waits":
            expected["engine/rollout/passes.py Passes._forward"] = FAMILIES[name].prompts
            expected["engine/models/policy.py Backbone.hidden_states"] *= FAMILIES[name].rows
        assert (name, dialect, found[kind] - expected, expected - found[kind]) == (name, dialect, {}, {})


def test_adapters_trunks_and_the_rest_keep_to_their_device(folder, tmp_path):
    start = make_adapter(tmp_path / "start", f"{folder}/actor", dim=4, seed=3)
    judge = make_adapter(tmp_path / "judge", f"{folder}/actor", dim=4, scorer=True)
    adapted = {"actor_lora": LORA, "critic_lora": LORA}
    runs = {
        "stage 2": {"stage": 2},
        "packed rows": {"attention": Attention(packing="packed")},
        "bf16, activations computed again": {
            "dtype": "bf16",
            "actor_gradient_checkpointing": True,
            "critic_gradient_checkpointing": True,
        },
        "adapters": adapted,
        "one trunk": adapted | {"actor": start, "critic_path": judge, "reward_path": judge, "share_trunk": True},
        "a moving reference, averages": {"reference_refresh_steps": 1, "ema_decay": 0.5},
        "hydra": {"hydra_layers": 1},
    }
    [found] = run_ranks("tests.distributed.work_second_device:variants", world=1, folder=folder, runs=runs)
    assert [name for name, seen in found.items() if seen["mixed"] or seen["collectives"]] == []
