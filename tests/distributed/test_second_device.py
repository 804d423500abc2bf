"""What only an accelerator would show of a step, counted on a second device in Python: no operation mixes devices, no
collective call is given a tensor on the CPU, and the host waits as often as it has to
(tests/engine/zero/second_device.py).

Stage 3 is left out: where DeepSpeed puts what it partitions cannot be told of this device.
"""

import pytest

from engine.models.attention import Attention
from engine.models.lora import LoraSpec
from scripts.harness.models import make_adapter, make_family
from scripts.harness.ranks import run_ranks

LORA = LoraSpec(dim=4, alpha=8, lr=2e-3, only=True)


FAMILIES = {  # model types, with these fields of their configurations
    "all positions": ("llama", {}),
    "windows of 8": ("mistral", {}),
    "windows in every other layer": ("gemma3_text", {}),
    "windows in the last layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "windows in masks that are added": ("gemma2", {}),
}


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> dict[str, str]:
    folders = {name: tmp_path_factory.mktemp(model_type) for name, (model_type, _) in FAMILIES.items()}
    for name, (model_type, changes) in FAMILIES.items():
        make_family(model_type, folders[name], **changes)
    return {name: str(folder) for name, folder in folders.items()}


def test_the_sampler_waits_once_in_8_tokens(families):
    """The first token comes with the prompts, so that 9 and 17 are drawn in 1 and 2 rounds."""
    [found] = run_ranks("tests.distributed.work_second_device:samplers", world=1, folders=families, lengths=[9, 17])
    for (name, decoding), (shorter, longer) in found.items():
        for rounds, seen in ((1, shorter), (2, longer)):
            assert (name, seen["ran"], seen["waits"]["engine/rollout/decode.py _Loop._draw"]) == (
                name,
                decoding,
                rounds,
            )
            assert not seen["mixed"] and not seen["collectives"]


# Of the second step of the default dialect, for 8 responses of 12 tokens a rank in micro-batches of 4, at stage 0 with
# two epochs. U: 2 updates; M: 2 models that are updated.
WAITS = {
    "engine/algo/advantages.py _discounted_sums": 2,  # the loop over positions runs on the host: there and back
    "engine/distributed.py all_gather_objects": 2,  # names of metrics, their sizes
    "engine/distributed.py largest": 12,  # U * (M + 2) + M + 2: overflow, losses, passes; weights, experience, passes
    "engine/experience.py Rollout.select": 11,  # widths, of each micro-batch of experience and of each update
    "engine/experience_maker.py _log_ratios": 1,  # tokens of which there are two log-probs
    "engine/models/policy.py Backbone.hidden_states": 15,  # transformers: whether a mask hides anything, once a pass
    "engine/packing.py micro_batches": 3,  # lengths, to divide rows by
    "engine/rollout/decode.py _Loop._draw": 2,  # once in 8 tokens
    "engine/rollout/passes.py Passes._forward": 1,  # as for hidden states
    "engine/rollout/request.py make_requests": 1,  # prompts' lengths
    "engine/zero/stages.py Stage0.step": 4,  # U * M: the gradient's norm
    "training/learner.py Learner._loss_weights": 2,  # U: tokens of all ranks
    "training/ppo_trainer.py mean_kls": 1,  # KL
    "training/reporting/metrics.py Accumulator.reduce": 2,  # sums, extremes
}
DIALECTS = ["default", "trlx", "trl_rloo", "dapo"]
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


def test_a_step_waits_no_more_than_it_has_to(steps):
    assert steps["all positions", "default"]["waits"] == WAITS


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
        "one trunk": adapted | {"actor": start, "critic_path": judge, "reward_paths": (judge,), "share_trunk": True},
        "a moving reference, averages": {"reference_refresh_steps": 1, "ema_decay": 0.5},
        "hydra": {"hydra_layers": 1},
    }
    [found] = run_ranks("tests.distributed.work_second_device:variants", world=1, folder=folder, runs=runs)
    assert [name for name, seen in found.items() if seen["mixed"] or seen["collectives"]] == []
