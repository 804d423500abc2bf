"""The simulation of a step: by hand from operations, bytes and the steps of rings; and its table (docs/scaling.md)."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.errors import UserError
from engine.memory import Cluster
from engine.memory.copies import Copies
from engine.memory.gpus import DataSheet, Link, data_sheet
from engine.zero.long_batch import Kept
from scripts.simulation import scaling
from scripts.simulation.scaling import DEEPSPEED_CHAT, OPENRLHF, ROLES, ROWS_OF_DEEPSPEED_CHAT, Point, Task, fitting
from scripts.simulation.step import ADAM, START, Decoder, Machines, MeasuredRanks, Part, Rates, Step, assumed
from tests.engine.memory.configurations import llama

SHEET = DataSheet(flops=1e14, bandwidth=1e12, link=Link(1e11, 0.0))
RATES = Rates(sheet=SHEET, layer_start=0.0, adam=1e12)
LARGE = Decoder(parameters=10_000_000_000, layers=50, width=4000, kept=1000, vocabulary=50_000)  # 192M a layer
SMALL = replace(LARGE, parameters=50_000_000, width=400, vocabulary=1000, layers=10)
FOUR = {"actor": LARGE, "reference": LARGE, "critic": LARGE, "reward": LARGE}
STEP = Step(decoders=FOUR, rows=16, decoded=8, prompt=100, response=100, micro_batch=4)
TEN = Machines(SHEET, gpus=10)
TASK = Task(actor="opt-350m", scorer="opt-350m", prompt=64, response=64, rows=32)


def forward(rows: int) -> float:
    """Operations of a pass over rows of 200 tokens."""
    return rows * 200 * (2 * 10e9 + 4 * 50 * 4000 * 100)


# Machines


def test_a_ring_takes_its_steps_and_its_share_of_the_bytes():
    sheet = DataSheet(flops=2e12, bandwidth=1e12, link=Link(1e11, 2e-6))
    one, two = Machines(sheet, gpus=4), Machines(sheet, gpus=4, nodes=2, network=Link(1e10, 5e-6))
    assert one.all_gather(4e9) == pytest.approx(10e-6 + 3 * 2e-6 + 3e9 / 1e11)
    assert one.all_reduce(4e9) == pytest.approx(10e-6 + 6 * 2e-6 + 6e9 / 1e11)
    # Eight ranks: seven steps, one of them over the network, whose bandwidth counts.
    assert two.all_gather(4e9) == pytest.approx(10e-6 + 6 * 2e-6 + 5e-6 + 3.5e9 / 1e10)
    assert two.all_reduce(4e9, ranks=4) == one.all_reduce(4e9)  # within a node
    assert two.all_reduce(4e9, ranks=1) == 0
    with pytest.raises(AssertionError, match="8 ranks on nodes of 4 GPUs need a network"):
        replace(two, network=None).all_gather(1.0)


def test_sums_over_nodes_go_along_a_tree_where_that_is_fewer_steps():
    nodes = Machines(replace(SHEET, link=Link(1e11, 2e-6)), gpus=8, nodes=16, network=Link(1e10, 5e-6))
    # Up and down: seven steps within a node and four between nodes, in place of 254 around the ring.
    assert nodes.all_reduce(0) == pytest.approx(START + 2 * (7 * 2e-6 + 4 * 5e-6))
    assert nodes.reduce_scatter(0) == pytest.approx(START + 15 * 5e-6 + 112 * 2e-6)


def test_measured_calls_are_read_between_sizes():
    ranks = MeasuredRanks(4, gathers=[(8, 0.02), (100, 0.03), (1100, 1.03)], reductions=[(8, 0.05), (1008, 1.05)])
    assert ranks.all_gather(0) == 0.02 == ranks.all_gather(8)
    assert ranks.all_gather(600) == pytest.approx(0.53)
    assert ranks.all_gather(2100) == pytest.approx(2.03)  # as the last piece goes on
    assert ranks.reduce_scatter(508) == pytest.approx(0.55)
    assert ranks.all_gather(600, 1) == ranks.all_reduce(600, 1) == 0


# A step


def test_partitions_are_gathered_for_every_pass_and_gradients_reduced():
    part = STEP.parts(RATES, TEN)["train actor"]
    assert part.compute == pytest.approx(3 * forward(16) / 1e14)
    # Four passes of four rows: weights forward and backward, a tenth of them there; and gradients once a pass.
    assert part.gathered == 8 * 20e9 and part.reduced == 4 * 20e9
    # 53 calls gather the model: 10^10 numbers in pieces of one layer, 192M. 200 calls reduce 50M gradients each.
    assert part.latency == pytest.approx((8 * 53 + 4 * 200) * START)
    assert part.transfer == pytest.approx(12 * 20e9 * 0.9 / 1e11)
    assert part.seconds == part.exchange  # 2.17 s, beside which 1.93 s of arithmetic go on
    alone = STEP.parts(replace(RATES, overlaps=False), TEN)["train actor"]
    assert alone.seconds == pytest.approx(part.compute + part.exchange)


def test_what_is_kept_or_lent_is_gathered_less():
    kept = replace(STEP, kept={"actor": Kept(weights=True, gradients=True)}, updates=2)
    assert kept.parts(RATES, TEN)["train actor"].gathered == 2 * 20e9
    assert kept.parts(RATES, TEN)["train actor"].reduced == 2 * 20e9
    lent = replace(kept, whole=frozenset(FOUR), own=frozenset(FOUR), stays=True)
    assert lent.parts(RATES, TEN)["train actor"].gathered == 20e9  # the first update has the copy's
    shared = replace(lent, own=frozenset())
    assert shared.parts(RATES, TEN)["train actor"].gathered == 2 * 20e9
    small = replace(STEP, decoders={**FOUR, "actor": SMALL})  # stays whole from the forward to the backward pass
    assert small.parts(RATES, TEN)["train actor"].gathered == 4 * 2 * 50e6


def test_copies_are_filled_when_others_have_taken_their_turn():
    taking_turns = replace(STEP, whole=frozenset(FOUR), stays=True)
    own = replace(taking_turns, own=frozenset(FOUR))
    for role in FOUR:
        sizes = [step.parts(RATES, TEN)[f"gather {role}"].gathered for step in (taking_turns, own)]
        assert sizes == [20e9, 0 if role in ("reference", "reward") else 20e9]
    # 150 buckets of 2^26 numbers, the last one not full; nine tenths come from others.
    part = own.parts(RATES, TEN)["gather actor"]
    assert part.latency == pytest.approx(150 * START) and part.transfer == pytest.approx(0.9 * 20e9 / 1e11)
    assert own.parts(RATES, TEN)["reference"].exchange == 0 < STEP.parts(RATES, TEN)["reference"].exchange


def test_tokens_are_read_turn_by_turn():
    parts = replace(STEP, whole=frozenset(FOUR)).parts(RATES, TEN)
    # Two turns of eight rows, 99 tokens each: all weights, and keys and values of 150 tokens.
    cached = 8 * 50 * 1000 * 2 * 150
    assert parts["tokens"].compute == pytest.approx(2 * 99 * (20e9 + cached) / 1e12)
    assert parts["tokens"].exchange == 0
    assert parts["prompts"].compute == pytest.approx(16 * 100 * (2 * 10e9 + 4 * 50 * 4000 * 50) / 1e14)


def test_ranks_that_hold_a_copy_together_sum_hidden_states_twice_a_layer():
    latent = replace(SHEET, link=Link(1e11, 2e-6))
    tokens = replace(STEP, divided=frozenset(FOUR), group=5).parts(RATES, Machines(latent, gpus=10))["tokens"]
    # A fifth of the weights, and the keys and values of five ranks' rows in five parts.
    assert tokens.compute == pytest.approx(2 * 99 * (20e9 / 5 + 8 * 50 * 1000 * 2 * 150) / 1e12)
    summed = START + 8 * 2e-6 + 2 * 4 / 5 * (40 * 4000 * 2) / 1e11  # 40 rows, twice four steps of the ring
    logits = START + 4 * 2e-6 + 4 / 5 * (40 * 50_000 * 2) / 1e11
    assert tokens.exchange == pytest.approx(2 * 99 * (101 * summed + logits))
    assert tokens.seconds == pytest.approx(tokens.compute + tokens.exchange) and tokens.gathered == 0


def test_partitions_are_gathered_for_prompts_and_each_token():
    parts = STEP.parts(replace(RATES, overlaps=False), TEN)
    assert parts["prompts"].gathered == 2 * 20e9 and parts["tokens"].gathered == 2 * 99 * 20e9
    assert parts["prompts"].latency == pytest.approx(2 * 53 * START)
    # A call for each layer and two more, 0.9 of the bytes; the next token is computed meanwhile.
    exchange, compute = 52 * START + 0.9 * 20e9 / 1e11, (20e9 + 8 * 50 * 1000 * 2 * 150) / 1e12
    assert parts["tokens"].seconds == pytest.approx(2 * 99 * max(exchange, compute))
    copies = replace(STEP, whole=frozenset(FOUR)).parts(RATES, TEN)
    assert copies["prompts"].gathered == copies["tokens"].gathered == 0


def test_states_on_the_host_cross_its_link_twice():
    on_gpu = STEP.parts(RATES, TEN)["step critic"]
    assert on_gpu.compute == pytest.approx(1e9 * ADAM / 1e12)
    slow = replace(RATES, host_link=1e10, host_adam=1e10)
    there = replace(STEP, offloaded=frozenset(FOUR)).parts(slow, TEN)
    assert there["step critic"].compute == pytest.approx(1e9 * (ADAM + 2 * 2) / 1e10)
    fetched = there["train critic"].transfer - STEP.parts(slow, TEN)["train critic"].transfer
    assert fetched == pytest.approx(8 * 2e9 / 1e10)


def test_a_models_shape_is_its_configurations():
    spec, _ = Task(actor="llama-2-70b", scorer="llama-2-7b", prompt=8, response=8, rows=1).asked(1, 1, ())
    shape = Decoder.of(scaling.blueprints(spec)["actor"])
    with torch.device("meta"):
        layers = {
            count: sum(p.numel() for p in LlamaForCausalLM(_llama_2_70b(layers=count)).parameters()) for count in (1, 2)
        }
    assert shape.parameters == layers[1] + 79 * (layers[2] - layers[1]) == 68_976_648_192
    assert shape.cached(1) == 80 * 2 * 8 * 128 * 2  # 327,680 bytes of a token
    assert (shape.layers, shape.width, shape.vocabulary, shape.number) == (80, 8192, 32000, 2)


def _llama_2_70b(layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
    )


# Settings and the table


@pytest.fixture
def planned(monkeypatch):
    """The planner, replaced: a function says whether (rows decoded, rows of a pass, engines on the host) fit, and
    whether the actor has a copy; gives what was asked."""
    asked = []

    def use(fits, copies=lambda offloaded: True):
        def planner(spec, load, cluster):
            offloaded = sum(config.offload for config in spec.engine_configs)
            asked.append((load.generated, load.micro_batch, offloaded))
            placed = Copies((0, 2) if copies(offloaded) else (), "", between_steps="free", divided=(1,), ranks=4)
            placed = placed if copies(offloaded) else Copies((), "")
            found = SimpleNamespace(fits=fits(*asked[-1]))
            needs = [SimpleNamespace(role=role, kind=role) for role in ROLES]
            return SimpleNamespace(plan=lambda: found, copies=placed, needs=needs, engines={}, kept={})

        monkeypatch.setattr(scaling, "Planner", planner)
        return asked

    return use


def test_the_first_setting_that_fits_is_taken(planned):
    planned(lambda generated, micro, offloaded: offloaded >= 2 and generated <= 16 and micro <= 2)
    step = fitting(TASK, Cluster(gpus=8))
    assert (step.decoded, step.micro_batch, step.offloaded) == (16, 2, {"reference", "reward"})
    assert step.whole == {"actor", "reference"} and step.divided == {"critic"} and step.group == 4 and not step.stays
    words = "16/2 rows, copies: actor, reference and copies of critic by 4, frozen on host"
    assert scaling.setting(step) == words


def test_what_has_no_copy_is_taken_last(planned):
    planned(lambda *asked: True, copies=lambda offloaded: offloaded == 4)
    assert fitting(TASK, Cluster(gpus=8)).offloaded == set(ROLES)
    planned(lambda *asked: True, copies=lambda offloaded: False)
    found = fitting(TASK, Cluster(gpus=8))
    assert not found.offloaded and scaling.setting(found) == "32/8 rows, partitions"


def test_where_the_smallest_does_not_fit_nothing_larger_is_planned(planned):
    asked = planned(lambda *asked: False)
    assert fitting(TASK, Cluster(gpus=8)) is None
    assert asked == [(8, 1, 0), (8, 1, 2), (8, 1, 4)]


@pytest.mark.slow
def test_the_planner_says_what_fits(monkeypatch, tmp_path):
    monkeypatch.setattr(scaling, "_folder", lambda name: llama(tmp_path))
    step = fitting(TASK, Cluster(gpus=2, gpu=85_000_000_000, host=10**12))
    assert step.whole == set(ROLES) and step.decoded == 32 and step.micro_batch == 8
    assert fitting(TASK, Cluster(gpus=2, gpu=1_500_000_000, host=10**12)) is None  # CUDA and NCCL alone take it


def point(gpus: int, rows: int, tokens: float, train: float, latency: float = 0.0, transfer: float = 0.0) -> Point:
    parts = {"tokens": Part(tokens), "train actor": Part(train, latency, transfer, overlaps=True)}
    return Point(gpus, rows, "as it is", parts)


def test_the_phase_that_loses_most_is_told():
    before = point(8, 16, tokens=4.0, train=8.0)
    assert scaling.why(before, point(16, 8, tokens=3.9, train=4.1)) == "tokens (reading weights)"
    assert scaling.why(before, point(16, 8, 2.0, 4.0, latency=8.0)) == "train (latency)"
    assert scaling.why(before, point(16, 8, 2.0, 4.0, transfer=8.0)) == "train (bytes)"


def test_a_row_tells_speed_and_what_was_lost():
    points = [(4, None), (8, point(8, 16, 4.0, 8.0)), (16, point(16, 8, 4.0, 8.0)), (32, point(32, 4, 3.0, 8.0))]
    _, _, none, first, second, third = scaling.table(points).splitlines()
    assert none.startswith("| 4 | | does not fit |")
    # 128 responses in 12 s, then again; then in 11 s: 11 a second of 42.7 with four times the GPUs.
    assert "| 12.0 | 11 | 1.00 |  |" in first
    assert "| 12.0 | 11 | 0.50 | 50%, train (few rows); **stops here** |" in second
    assert "| 11.0 | 12 | 0.27 | 45%, train (few rows) |" in third  # it has stopped before
    slower = scaling.table([(8, point(8, 16, 4.0, 8.0)), (16, point(16, 8, 8.0, 8.0))]).splitlines()[-1]
    assert "tokens (reading weights); **stops here**; slower than half as many |" in slower
    assert {line.count("|") for line in scaling.table(points).splitlines()} == {14}


def test_gpus_have_data_sheets_by_the_planners_names():
    assert scaling.sheet_of("a100-80g").bandwidth == 2039e9 and scaling.sheet_of("a100-40g").bandwidth == 1555e9
    with pytest.raises(UserError, match="--gpu rtx-4090: no data sheet"):
        scaling.sheet_of("rtx-4090")


def test_published_settings_are_those_of_their_sources():
    # 264,292 prompts of 256 tokens and as many answers are the 135,317,504 tokens that are stated.
    assert ROWS_OF_DEEPSPEED_CHAT * 512 == 135_317_504
    assert [(gpus, hours) for _, gpus, hours in DEEPSPEED_CHAT] == [(8, 9.0), (64, 1.25), (64, 7.5)]
    assert [sum(placed.values()) for _, placed, _, _ in OPENRLHF] == [16, 32]


def test_gpus_of_other_models_wait_while_one_draws():
    def seconds(**gpus: int) -> float:
        placed = {"reference": 2, "reward": 2, "actor": 4, "critic": 4, "vllm": 4} | gpus
        return scaling.placed_seconds("llama-2-7b", placed, 1, assumed(data_sheet("NVIDIA A800-SXM4-80GB")))

    assert seconds(vllm=8) < seconds() and seconds(actor=8, critic=8) < seconds()
    assert seconds(reward=4) == seconds()  # the reference takes as long as before
