"""What only an accelerator would show of a step, counted on a second device in Python: no operation mixes devices, no
collective call is given a tensor on the CPU, and the host waits and sends as often as it has to
(tests/engine/zero/second_device.py).

Stage 3 is left out: where DeepSpeed puts what it partitions cannot be told of this device.
"""

import pytest

from engine.algorithms import DIALECTS
from engine.models.attention import Attention
from engine.models.lora import LoraSpec
from scripts.harness.models import make_adapter
from scripts.harness.ranks import run_ranks

LORA = LoraSpec(dim=4, alpha=8, lr=2e-3, only=True)


def test_the_sampler_waits_once_in_8_tokens(folder):
    """The first token comes with the prompts, so that 17 and 25 are drawn in 2 and 3 rounds. Beside them it asks for
    the prompts' lengths, and transformers whether a mask hides anything."""
    found = run_ranks("tests.distributed.work_second_device:samplers", world=1, folder=folder, lengths=[17, 25])[0]
    for shorter, longer in found.values():
        for rounds, seen in ((2, shorter), (3, longer)):
            assert not seen["mixed"] and not seen["collectives"]
            assert sorted(seen["waits"].values()) == [1, 1, rounds]
            assert seen["waits"]["engine/rollout/decode.py _Loop._draw"] == rounds
            assert seen["copies"] == {
                "engine/rollout/decode.py _Loop._draw": rounds,  # rows, lengths and tokens drawn, in one
                "engine/rollout/decode.py _Loop._join": 1,  # rows that begin
                "engine/rollout/draws.py Draws.__init__": 1,  # what is never drawn
                "engine/rollout/decode.py rollout_of": 3,  # tokens, lengths, which have ended
            }


# Of the second step of each dialect, for 8 responses of 12 tokens a rank in micro-batches of 4, at stage 0 with at most
# two epochs, mini-batches and responses to a prompt. U: updates; M: models that are updated.
GROUPS = [
    ["default"],
    ["openai"],
    ["deepspeed_chat", "deepspeed_chat_2023"],
    ["summarize", "trl_ppo"],
    ["trlx"],
    ["trl_rloo"],
    ["grpo", "grpo_trl", "reinforce_pp_baseline", "rloo"],
    ["dr_grpo", "gspo", "reinforce_pp"],
    ["dapo"],
]
WAITS = {
    # names of metrics, their sizes
    "engine/distributed.py all_gather_objects": [2, 2, 2, 2, 2, 2, 2, 2, 6],
    # U * (M + 2) + M + 2: overflow, losses, passes; weights, experience, passes
    "engine/distributed.py largest": [12, 12, 8, 12, 20, 9, 6, 9, 10],
    # widths, of each micro-batch of experience and of each update, and of its own where lengths differ
    "engine/experience.py Rollout.select": [11, 11, 7, 11, 12, 11, 7, 8, 16],
    # tokens of which there are two log-probs
    "engine/experience_maker.py _log_ratios": [1, 1, 1, 1, 1, 1, 1, 1, 1],
    # transformers: whether a mask hides anything, once a padded pass
    "engine/models/policy.py Backbone.hidden_states": [15, 15, 12, 15, 16, 9, 8, 8, 8],
    # lengths, to divide rows by
    "engine/packing.py micro_batches": [3, 3, 1, 1, 1, 1, 2, 3, 4],
    # once in 8 tokens
    "engine/rollout/decode.py _Loop._draw": [2, 2, 2, 2, 2, 2, 2, 2, 2],
    # transformers', of the prompts
    "engine/rollout/passes.py Passes._forward": [1, 1, 1, 1, 1, 1, 1, 1, 1],
    # prompts' lengths
    "engine/rollout/request.py requests_of": [1, 1, 1, 1, 1, 1, 1, 1, 1],
    # U * M: the gradient's norm
    "engine/zero/stages.py Stage0.step": [4, 4, 2, 4, 8, 2, 1, 2, 2],
    # which groups score alike
    "training/group_sampling.py GroupSampler._groups": [0, 0, 0, 0, 0, 0, 0, 0, 1],
    # U: tokens of all ranks
    "training/learner.py Learner._loss_weights": [2, 2, 1, 2, 4, 2, 1, 2, 2],
    # KL
    "training/ppo_trainer.py mean_kls": [1, 1, 1, 1, 1, 1, 1, 1, 1],
    # sums, extremes
    "training/reporting/metrics.py Accumulator.reduce": [2, 2, 2, 2, 2, 2, 2, 2, 2],
}
COPIES = {
    # U + 1: numbers of passes
    "engine/distributed.py largest": [3, 3, 2, 3, 5, 3, 2, 3, 4],
    # its four tensors
    "engine/experience.py PromptBatch.to": [4, 4, 4, 4, 4, 4, 4, 4, 4],
    # lengths, to divide rows by
    "engine/packing.py micro_batches": [3, 3, 1, 1, 1, 1, 2, 3, 4],
    # once in 8 tokens
    "engine/rollout/decode.py _Loop._draw": [2, 2, 2, 2, 2, 2, 2, 2, 2],
    # rows that begin
    "engine/rollout/decode.py _Loop._join": [1, 1, 1, 1, 1, 1, 1, 1, 1],
    # tokens, lengths, which have ended
    "engine/rollout/decode.py rollout_of": [3, 3, 3, 3, 3, 3, 3, 3, 3],
    # what is never drawn
    "engine/rollout/draws.py Draws.__init__": [1, 1, 1, 1, 1, 1, 1, 1, 1],
    # 2 * U * M: DeepSpeed's clipping
    "engine/zero/stages.py Stage0.step": [8, 8, 4, 8, 16, 4, 2, 4, 4],
    # U: which rows
    "training/learner.py mini_batch_rows": [2, 2, 1, 2, 4, 2, 1, 2, 2],
    # metrics that are numbers of the host
    "training/reporting/metrics.py Accumulator._flat": [26, 25, 26, 25, 26, 23, 23, 23, 28],
}


@pytest.fixture(scope="module")
def steps(folder) -> dict[str, dict]:
    return run_ranks("tests.distributed.work_second_device:steps", world=1, folder=folder, names=list(DIALECTS))[0]


def test_every_dialect_keeps_to_its_device(steps):
    assert steps.keys() == set(DIALECTS) == {name for group in GROUPS for name in group}
    for found in steps.values():
        assert not found["mixed"] and not found["collectives"]


@pytest.mark.parametrize("kind, table", [("waits", WAITS), ("copies", COPIES)])
def test_a_step_waits_and_sends_no_more_than_it_has_to(steps, kind, table):
    for column, group in enumerate(GROUPS):
        expected = {place: numbers[column] for place, numbers in table.items() if numbers[column]}
        for name in group:
            assert (name, steps[name][kind]) == (name, expected)


def test_adapters_trunks_and_the_rest_keep_to_their_device(folder, tmp_path):
    start = make_adapter(tmp_path / "start", f"{folder}/actor", dim=4, seed=3)
    judge = make_adapter(tmp_path / "judge", f"{folder}/actor", dim=4, scorer=True)
    adapted = {"actor_lora": LORA, "critic_lora": LORA}
    runs = {
        "stage 2": {"stage": 2},
        "packed rows": {"attention": Attention(packing="packed")},
        "adapters": adapted,
        "one trunk": adapted | {"actor": start, "critic_path": judge, "reward_path": judge, "share_trunk": True},
        "a moving reference, averages": {"reference_refresh_steps": 1, "ema_decay": 0.5},
        "hydra": {"hydra_layers": 1},
    }
    [found] = run_ranks("tests.distributed.work_second_device:variants", world=1, folder=folder, runs=runs)
    assert found == {name: {"mixed": {}, "collectives": {}} for name in runs}
