"""Memory in one process: its peak grows with the chunk of logits, not with B x T x V, by counted bytes; where it runs
out, batches are halved, or the run ends with a message; and what the C library keeps goes back to the system.

The vocabulary is 50,000 and the trunk 8 wide, so that logits are nearly all there is: B x T x V x 4 bytes, 51 MB for 4
responses of 64 tokens, if they existed at once. A chunk of C logits is 4 C bytes. As many chunks' worth exist at once:

    without gradients, with the entropy      5: logits, log-probs, exp(log-probs), log-probs without -inf, their product
    forward and backward, without entropy    3: logits, logits / temperature, log-probs; later log-probs, the gradient
                                             with respect to them, that with respect to logits / temperature
"""

import multiprocessing
import os
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from engine import distributed
from engine.algo.losses import policy_loss
from engine.algorithms import Algorithm, Dialect
from engine.copies import TensorParallelCopies, WholeCopies
from engine.errors import RunStopped
from engine.experience import Rollout, position_ids
from engine.experience_maker import ExperienceMaker
from engine.host_memory import GIVEN_BACK_EVERY, give_back_at, keep_freed_memory
from engine.models import heads
from engine.models.loading import load_policy
from engine.models.lora import LoraSpec, adapt
from engine.models.policy import Policy, Scorer
from engine.reference import Reference
from engine.reward.base import RewardModel
from engine.rollout import Zero3Rollouts, build_rollouts
from engine.rollout.decode import Draws, Sampler
from scripts.harness.models import make_causal_lm, make_tokenizer
from tests.engine.fake_models import Resident, rollout_of
from tests.engine.meters import LiveBytes
from tests.engine.rollout.test_decode import BATCH, PROMPTS, SAMPLING, answers

VOCABULARY, WIDTH, PROMPT, RESPONSE, ROWS = 50_000, 8, 8, 64, 4
CHUNK = 8 * VOCABULARY  # logits of 8 positions
FORWARD_CHUNKS, TRAINING_CHUNKS = 5, 3
HEAD = VOCABULARY * WIDTH * 4  # bytes of the head's weight; the embedding's are as many


class Plain(Resident):
    """A module that stands for its engine."""

    def __init__(self, module):
        super().__init__(module)
        self.module = module

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=8,
        num_hidden_layers=1,
        num_labels=1,
        num_attention_heads=1,
        max_position_embeddings=512,
        pad_token_id=0,
        attn_implementation="sdpa",
    )


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.manual_seed(0)
    return Policy(LlamaForCausalLM(config()))


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    torch.manual_seed(1)
    return Scorer(LlamaForSequenceClassification(config()))


def rollout(rows: int) -> Rollout:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, VOCABULARY, (rows, PROMPT + RESPONSE), generator=generator).tolist()
    return rollout_of([row[:PROMPT] for row in tokens], [row[PROMPT:] for row in tokens], 0)


@pytest.fixture
def chunked(monkeypatch):
    """Set how many logits the head computes at a time."""
    head_logprobs = heads.head_logprobs
    return lambda elements: monkeypatch.setattr(heads, "head_logprobs", partial(head_logprobs, at_once=elements))


def judging(policy: Policy, scorer: Scorer, rows: int) -> int:
    """The peak of `make_experience`, all rows in one pass, above the weights."""
    actor, critic, judged = Plain(policy), Plain(scorer), rollout(rows)
    maker = ExperienceMaker(
        actor=actor,
        critic=critic,
        reference=Reference(actor),
        reward=RewardModel(critic),
        algorithm=Algorithm(Dialect(), pad_token_id=0),
        micro_batch_size=rows,
    )
    with LiveBytes(known=[*policy.parameters(), *scorer.parameters()]) as meter:
        experience = maker.make_experience(judged)
    assert experience.logprobs.shape == (rows, RESPONSE)
    return meter.peak


def training(policy: Policy, rows: int) -> int:
    """The peak of one forward and backward pass of the policy loss, above the weights; gradients are left behind."""
    policy.zero_grad(set_to_none=True)
    learned = rollout(rows)
    numbers = torch.zeros(rows, RESPONSE)
    with LiveBytes(known=policy.parameters()) as meter:
        logprobs, _ = policy(
            learned.sequences, learned.attention_mask, learned.position_ids, response_length=RESPONSE, temperature=0.7
        )
        policy_loss(logprobs, logprobs.detach() + 0.1, numbers + 1, learned.response_mask, 0.2).loss.backward()
    assert policy.model.lm_head.weight.grad.any()
    return meter.peak


def logits_bytes(rows: int) -> int:
    return rows * RESPONSE * VOCABULARY * 4


def check_growth(peak, chunked, chunks: int, other_bytes: int) -> None:
    """`peak(rows)` is `chunks` chunks, at most `other_bytes`, and next to nothing for each row."""
    little = logits_bytes(ROWS) // 100
    chunked(CHUNK)
    first = peak(ROWS)
    assert 0 <= first - chunks * 4 * CHUNK <= other_bytes + little
    assert logits_bytes(ROWS) > 5 * first
    assert 0 <= peak(2 * ROWS) - first < little  # where whole logits would have added logits_bytes(ROWS), once or more
    chunked(2 * CHUNK)
    assert abs(peak(ROWS) - first - chunks * 4 * CHUNK) < little


def test_making_experience_takes_chunks_not_logits(policy, scorer, chunked):
    check_growth(partial(judging, policy, scorer), chunked, FORWARD_CHUNKS, other_bytes=0)


def test_training_takes_chunks_not_logits(policy, chunked):
    """Beside them there are the gradient of the head's weight, and that of the chunk that is being added to it."""
    check_growth(partial(training, policy), chunked, TRAINING_CHUNKS, other_bytes=2 * HEAD)


def test_whole_logits_would_be_seen(policy, scorer, chunked):
    """A chunk that holds all of them; and the plain way, in which a model's logits go through log_softmax."""
    chunked(ROWS * RESPONSE * VOCABULARY)
    assert judging(policy, scorer, ROWS) >= FORWARD_CHUNKS * logits_bytes(ROWS)
    assert training(policy, ROWS) >= TRAINING_CHUNKS * logits_bytes(ROWS)
    tokens = rollout(1).sequences
    with torch.no_grad(), LiveBytes(known=policy.parameters()) as meter:
        F.log_softmax(policy.model(tokens, use_cache=False).logits, -1)
    assert meter.peak >= 2 * tokens.numel() * VOCABULARY * 4


def test_a_mapped_file_takes_no_memory_until_it_is_copied(tmp_path):
    save_file({"weight": torch.ones(1000)}, tmp_path / "model.safetensors")
    with LiveBytes() as meter, safe_open(tmp_path / "model.safetensors", "pt") as file:
        mapped = file.get_tensor("weight")
        assert (meter.live, meter.peak) == (0, 0)
        own = mapped * 2
        assert meter.live == 4000 and own.sum() == 2000


def test_the_meter_counts_what_is_alive_at_once():
    known = torch.zeros(1000)
    with LiveBytes(known=[known]) as meter:
        for _ in range(5):
            double = known * 2  # 4000 bytes, given back when the next takes its name
        assert (meter.live, meter.peak) == (4000, 8000)
        view, own = double[:10], known.view(10, 100)  # nothing new
        assert meter.live == 4000 and len(view) == len(own)
        del double
        assert meter.live == 4000  # the view holds it
        nothing = torch.zeros(1000, device="meta").to("meta", torch.float64)
        assert meter.live == 4000 and nothing.is_meta
        del view
        assert (meter.live, meter.peak) == (0, 8000)
        known.exp_()
        weight = known.clone().requires_grad_()
        (weight**2).sum().backward()
        assert weight.grad is not None and meter.live == 8000  # weight and gradient; the square and the sum are gone
    assert torch.ones(10).sum() == 10 and meter.live == 8000  # outside nothing is counted


HALVED_ROWS = 8
TOKENS = torch.arange(4, 20).view(2, 8)


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory) -> str:
    return make_causal_lm(tmp_path_factory.mktemp("policy"), "llama")


@pytest.fixture(scope="module")
def small_policy(policy_folder):
    return load_policy(policy_folder, torch.float32).eval()


def engine(small_policy, stage: int = 3) -> SimpleNamespace:
    """What copies and backends ask of an engine; its weights stand whole."""
    found = SimpleNamespace(
        module=small_policy.requires_grad_(False), stage=stage, version=0, role="actor", copies=None
    )
    found.host = found
    return found


def fails(times: int, then=lambda *args, **kwargs: None):
    """A function without memory for its first calls."""
    calls = []

    def call(*args, **kwargs):
        calls.append(None)
        if len(calls) <= times:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return then(*args, **kwargs)

    return call


@pytest.mark.parametrize("times", (1, 2, 3))
def test_fewer_rows_are_decoded_at_once_to_the_same_responses(small_policy, monkeypatch, times):
    expected = answers(Sampler(make_tokenizer(), HALVED_ROWS).responses(small_policy.model, BATCH, SAMPLING))
    sampler = Sampler(make_tokenizer(), HALVED_ROWS)
    freed, release = [], sampler.release_memory
    monkeypatch.setattr(sampler, "release_memory", lambda: freed.append(release()))
    monkeypatch.setattr(Draws, "draw", fails(times, Draws.draw))
    with pytest.warns(UserWarning, match="decoded side by side do not fit on rank 0") as told:
        found = answers(sampler.responses(small_policy.model, BATCH, SAMPLING))
    assert found == expected and len(found) == len(PROMPTS) > HALVED_ROWS and len(freed) == times
    halves = [(8, 4), (4, 2), (2, 1)][:times]
    assert [str(one.message) for one in told] == [
        f"{before} responses decoded side by side do not fit on rank 0 (CUDA out of memory): "
        f"from now on {after} are decoded"
        for before, after in halves
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answers(sampler.responses(small_policy.model, BATCH, SAMPLING)) == expected


@pytest.mark.parametrize("how", ({}, {"agree": distributed.largest}), ids=("alone", "together"))
def test_an_eighth_of_the_rows_is_the_fewest_and_ranks_that_wait_keep_theirs(small_policy, monkeypatch, how):
    sampler = Sampler(make_tokenizer(), 2 * HALVED_ROWS, **how)
    monkeypatch.setattr(Draws, "draw", fails(100))
    with warnings.catch_warnings(record=True) as told, pytest.raises(torch.OutOfMemoryError):
        warnings.simplefilter("always")
        sampler.responses(small_policy.model, BATCH.repeat(2), SAMPLING)
    assert sampler.rows_at_once == (2 * HALVED_ROWS if how else 2) and len(told) == (0 if how else 3)


def test_a_rank_that_cannot_fall_back_alone_ends_the_run_with_a_message(small_policy, monkeypatch):
    model, rows = engine(small_policy), (TOKENS, torch.ones_like(TOKENS), position_ids(torch.ones_like(TOKENS)))
    help_ = "rank 0, when {}.*other ranks wait.*--rollout_backend zero3"
    monkeypatch.setattr("engine.copies.copy_weights", fails(1))
    with pytest.raises(RunStopped, match="copy of the actor does not fit.*" + help_.format("it was filled")):
        WholeCopies().of(model)
    together = TensorParallelCopies(1)
    assert together.inferred(model, *rows, response_length=3) is not None
    monkeypatch.setattr("engine.copies._inferred", fails(1))
    with pytest.raises(RunStopped, match=help_.format("experience was made with it")):
        together.inferred(model, *rows, response_length=3)


def test_a_divided_copy_takes_the_place_of_an_actor_with_adapters_where_it_generates_alone(policy_folder, monkeypatch):
    """Its updates are merged there for good; experience wants them beside the matrices."""
    adapted = load_policy(policy_folder, torch.float32).eval()
    adapt(adapted, LoraSpec(dim=4, alpha=6.0, only=True, targets="all-linear"), "actor")
    model = SimpleNamespace(module=adapted, stage=3, version=0, role="actor")
    together = TensorParallelCopies(1)
    whole, released = WholeCopies("free", smaller=lambda model: together), []
    monkeypatch.setattr("engine.copies._merged", fails(1))
    whole.let_go = lambda: released.append(True)
    with pytest.warns(UserWarning, match="when adapters were merged.: 1 ranks hold one together from now on"):
        copy = whole.of(model, merged=True)
    assert copy is together.of(model, merged=True) and whole.group_of(model) is together.group
    assert whole.of(model) is None and not whole._modules and released == [True]
    whole.release_memory()
    assert together._parts  # which it keeps


def test_no_copy_to_generate_with_is_made_without_room_for_keys_and_values(small_policy, monkeypatch):
    cache, empty = 12345, torch.empty
    full = fails(100)
    monkeypatch.setattr(torch, "empty", lambda *size, **how: full() if size == (cache,) else empty(*size, **how))
    copies, model = TensorParallelCopies(1, cache=cache), engine(small_policy)
    assert copies.of(model) is not None  # for experience
    copies.free()
    with pytest.warns(UserWarning, match="copy of the actor does not fit .*: it computes through its partitions"):
        assert copies.of(model, merged=True) is None
    assert not copies._parts


def test_a_number_of_ranks_that_does_not_divide_the_machines_is_told(small_policy, monkeypatch):
    monkeypatch.setattr("engine.zero.accelerator.free_memory", lambda: 0)
    monkeypatch.setattr("engine.zero.accelerator.ranks_of_this_machine", lambda: 8)
    told = "; no 3 ranks hold a copy together, since that does not divide the 8 of a machine"
    for stage, asked, ending in ((3, 3, told), (3, 1, ""), (0, 3, "")):
        why = build_rollouts("auto", engine(small_policy, stage), make_tokenizer(), tensor_parallel=asked).why
        assert (told in why) == bool(ending), why


def test_other_copies_are_released_by_a_backend_without_its_own(small_policy):
    released = []
    other = WholeCopies()
    other.release_memory = lambda: released.append(True)
    Zero3Rollouts(engine(small_policy), make_tokenizer(), others=[other]).release_memory()
    assert released == [True]


MB = 1 << 20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _readings(answers) -> None:
    """Resident bytes: with 200 tensors of half an MB, when those between others were freed, after the last step before
    memory goes back, and after that at which it does."""
    keep_freed_memory()
    tensors = [torch.ones(MB // 8) for _ in range(200)]
    found = [_resident()]
    tensors = tensors[::2]  # what is freed lies in between
    found.append(_resident())
    for step in (GIVEN_BACK_EVERY - 1, GIVEN_BACK_EVERY):
        give_back_at(step)
        found.append(_resident())
    assert len(tensors) == 100
    answers.put(found)


@pytest.mark.slow
def test_freed_memory_is_kept_for_some_steps_and_then_given_back():
    """In a process of its own: how the C library keeps memory is set for good."""
    context = multiprocessing.get_context("forkserver")
    answers = context.SimpleQueue()
    process = context.Process(target=_readings, args=(answers,))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    all_held, freed, before, after = answers.get()
    assert abs(freed - all_held) < 5 * MB and abs(before - all_held) < 5 * MB
    assert abs(all_held - after - 50 * MB) < 5 * MB  # 100 tensors of half an MB
