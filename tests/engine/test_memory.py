"""Memory in one process: its peak grows with the chunk of logits, not with B x T x V, by counted bytes; and what the C
library keeps goes back to the system.

The vocabulary is 50,000 and the trunk 8 wide, so that logits are nearly all there is: B x T x V x 4 bytes, 51 MB for 4
responses of 64 tokens, if they existed at once. A chunk of C logits is 4 C bytes. As many chunks' worth exist at once:

    without gradients, with the entropy      5: logits, log-probs, exp(log-probs), log-probs without -inf, their product
    forward and backward, without entropy    3: logits, logits / temperature, log-probs; later log-probs, the gradient
                                             with respect to them, that with respect to logits / temperature
    forward and backward, with entropy    5.25: log-probs, exp(log-probs), log-probs without -inf, a byte that tells
                                             which of them were, the gradients with respect to both factors
"""

import multiprocessing
import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from engine.algo.losses import clipped_surrogate
from engine.algorithms import Algorithm, Dialect
from engine.experience import Rollout
from engine.experience_maker import ExperienceMaker
from engine.host_memory import RELEASED_EVERY, keep_freed_memory, release_freed_memory
from engine.models import heads
from engine.models.policy import Policy, Scorer
from engine.reference import Reference
from engine.reward.base import RewardModel
from tests.engine.fake_models import Resident, rollout_of
from tests.engine.meters import LiveBytes

VOCABULARY, WIDTH, PROMPT, RESPONSE, ROWS = 50_000, 8, 8, 64, 4
CHUNK = 8 * VOCABULARY  # logits of 8 positions
FORWARD_CHUNKS, TRAINING_CHUNKS, BONUS_CHUNKS = 5, 3, 5.25
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


def training(policy: Policy, rows: int, bonus: bool = False) -> int:
    """The peak of one forward and backward pass of the policy loss, above the weights; gradients are left behind.
    bonus: whether the loss has an entropy bonus."""
    policy.zero_grad(set_to_none=True)
    learned = rollout(rows)
    numbers = torch.zeros(rows, RESPONSE)
    with LiveBytes(known=policy.parameters()) as meter:
        given = learned.sequences, learned.attention_mask, learned.position_ids
        logprobs, entropy = policy(*given, response_length=RESPONSE, temperature=0.7, with_entropy=bonus)
        surrogate = clipped_surrogate(logprobs, logprobs.detach() + 0.1, numbers + 1, learned.response_mask, 0.2)
        (surrogate.loss - 0.1 * entropy.sum()).backward()
    assert policy.model.lm_head.weight.grad.any()
    return meter.peak


def logits_bytes(rows: int) -> int:
    return rows * RESPONSE * VOCABULARY * 4


def check_growth(peak, chunked, chunks: float, other_bytes: int) -> None:
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


def test_an_entropy_bonus_takes_chunks_not_logits(policy, chunked):
    check_growth(partial(training, policy, bonus=True), chunked, BONUS_CHUNKS, other_bytes=2 * HEAD)


def test_whole_logits_would_be_seen(policy, scorer, chunked):
    """A chunk that holds all of them; and the plain way, in which a model's logits go through log_softmax."""
    chunked(ROWS * RESPONSE * VOCABULARY)
    assert judging(policy, scorer, ROWS) >= FORWARD_CHUNKS * logits_bytes(ROWS)
    assert training(policy, ROWS) >= TRAINING_CHUNKS * logits_bytes(ROWS)
    tokens = rollout(1).sequences
    with torch.no_grad(), LiveBytes(known=policy.parameters()) as meter:
        F.log_softmax(policy.model(tokens, use_cache=False).logits, -1)
    assert meter.peak >= 2 * tokens.numel() * VOCABULARY * 4


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
    for step in (RELEASED_EVERY - 1, RELEASED_EVERY):
        release_freed_memory(step)
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
