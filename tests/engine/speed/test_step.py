"""A step of PPO on paper: by hand from operations, bytes, and the steps of rings."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from engine.memory.data_sheets import DataSheet, Link
from engine.speed.crossings import ring_crossings, tree_crossings
from engine.speed.decoding import Decoder
from engine.speed.exchanges import partitioned
from engine.speed.machines import START, Machines
from engine.speed.measured import MeasuredRanks
from engine.speed.rates import Rates
from engine.speed.shapes import SHAPES, configuration, decoder
from engine.speed.step import ADAM, Step
from engine.zero.long_batch import Kept

SHEET = DataSheet(flops=1e14, bandwidth=1e12, link=Link(1e11, 0.0))
RATES = Rates(sheet=SHEET, layer_start=0.0, token_start=0.0, adam=1e12)
LARGE = Decoder(parameters=10_000_000_000, layers=50, width=4000, kept=1000, vocabulary=50_000)  # 192M a layer
SMALL = replace(LARGE, parameters=50_000_000, width=400, vocabulary=1000, layers=10)
FOUR = {"actor": LARGE, "reference": LARGE, "critic": LARGE, "reward": LARGE}
STEP = Step(decoders=FOUR, rows=16, decoded=8, prompt=100, response=100, micro_batch=4)
TEN = Machines(SHEET, gpus=10)


def forward(rows: int) -> float:
    """Operations of a pass over rows of 200 tokens."""
    return rows * 200 * (2 * 10e9 + 4 * 50 * 4000 * 100)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("scorer", [False, True])
def test_published_shapes_are_their_configurations(name, scorer, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(configuration(name)))
    config = AutoConfig.from_pretrained(tmp_path)
    kind = AutoModelForSequenceClassification if scorer else AutoModelForCausalLM
    config.num_labels = 1
    sizes = {}
    for layers in (1, 2):  # further ones are like the second
        config.num_hidden_layers = layers
        with torch.device("meta"):
            sizes[layers] = sum(parameter.numel() for parameter in kind.from_config(config).parameters())
    shape = decoder(name, scorer)
    assert shape.parameters == sizes[1] + (shape.layers - 1) * (sizes[2] - sizes[1])


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
    plan = replace(partitioned(LARGE), kept=Kept(weights=True, gradients=True))
    kept = replace(STEP, engines={"actor": plan}, updates=2)
    assert kept.parts(RATES, TEN)["train actor"].gathered == 2 * 20e9
    assert kept.parts(RATES, TEN)["train actor"].reduced == 2 * 20e9
    lent = replace(kept, whole=frozenset(FOUR), own=frozenset(FOUR), stays=True)
    assert lent.parts(RATES, TEN)["train actor"].gathered == 20e9  # the first update has the copy's
    shared = replace(lent, own=frozenset())
    assert shared.parts(RATES, TEN)["train actor"].gathered == 2 * 20e9
    small = replace(STEP, decoders={**FOUR, "actor": SMALL})  # stays whole from the forward to the backward pass
    assert small.parts(RATES, TEN)["train actor"].gathered == 4 * 2 * 50e6


def test_a_critic_that_learns_apart_has_its_own_updates():
    joint, apart = STEP.parts(RATES, TEN), replace(STEP, critic_updates=(6, 2)).parts(RATES, TEN)
    assert apart["train actor"] == joint["train actor"] and apart["step actor"] == joint["step actor"]
    assert apart["train critic"].compute == pytest.approx(6 * 3 * forward(8) / 1e14)  # six updates of half the rows
    assert apart["train critic"].gathered == 6 * 2 * 2 * 20e9  # each of two passes, forward and backward
    assert apart["step critic"].compute == pytest.approx(6 * joint["step critic"].compute)
    calls = joint[
        "agree on updates"
    ].latency  # of one step of both models; of seven of one each they are 3.5 times that
    assert apart["agree on updates"].latency == pytest.approx(3.5 * calls)


def test_copies_are_filled_when_others_have_taken_their_turn():
    taking_turns = replace(STEP, whole=frozenset(FOUR), stays=True)
    own = replace(taking_turns, own=frozenset(FOUR))
    filled = {role: (taking_turns.parts(RATES, TEN), own.parts(RATES, TEN)) for role in FOUR}
    for role, found in filled.items():
        sizes = [parts[f"gather {role}"].gathered for parts in found]
        assert sizes == [20e9, 0 if role in ("reference", "reward") else 20e9]
    # 150 buckets of 2^26 numbers, the last one not full; nine tenths come from others.
    part = own.parts(RATES, TEN)["gather actor"]
    assert part.latency == pytest.approx(150 * START) and part.transfer == pytest.approx(0.9 * 20e9 / 1e11)
    assert own.parts(RATES, TEN)["reference"].exchange == 0 < STEP.parts(RATES, TEN)["reference"].exchange


def test_tokens_are_read_turn_by_turn():
    whole = replace(STEP, whole=frozenset(FOUR))
    parts = whole.parts(RATES, TEN)
    # Two turns of eight rows, 99 tokens each: all weights, and keys and values of 150 tokens.
    cached = 8 * 50 * 1000 * 2 * 150
    assert parts["tokens"].compute == pytest.approx(2 * 99 * (20e9 + cached) / 1e12)
    assert parts["tokens"].exchange == 0
    assert parts["prompts"].compute == pytest.approx(16 * 100 * (2 * 10e9 + 4 * 50 * 4000 * 50) / 1e14)


def test_partitions_are_gathered_for_prompts_and_each_token():
    parts = STEP.parts(replace(RATES, overlaps=False), TEN)
    assert parts["prompts"].gathered == 2 * 20e9 and parts["tokens"].gathered == 2 * 99 * 20e9
    assert parts["prompts"].latency == pytest.approx(2 * 53 * START)
    copies = replace(STEP, whole=frozenset(FOUR)).parts(RATES, TEN)
    assert copies["prompts"].gathered == copies["tokens"].gathered == 0


def test_with_hpz_a_step_gathers_over_all_ranks_once():
    """Nodes of two: what goes between them has its latency, within them there is none."""
    nodes = Machines(SHEET, gpus=2, nodes=5, network=Link(1e10, 1.0))
    hpz = replace(partitioned(LARGE), hpz=2)
    engines = {role: hpz if role in ("actor", "critic") else replace(hpz, trains=0) for role in FOUR}
    parts = replace(STEP, engines=engines).parts(RATES, nodes)
    far = {name: round(part.latency) for name, part in parts.items() if part.gathered}
    # 53 calls of four steps between nodes: the actor's in its first pass over prompts, the critic's where it scores;
    # gradients, 200 calls in each of four passes, go between them as ever.
    assert far == {
        "prompts": 53 * 4,
        "tokens": 0,
        "actor": 0,
        "reference": 0,
        "critic": 53 * 4,
        "reward": 0,
        "train critic": 4 * 200 * 4,
        "train actor": 4 * 200 * 4,
    }


def test_an_adapters_factors_alone_come_anew_and_its_matrices_after_a_rollout():
    adapted = replace(partitioned(LARGE), trains=10**8, unmerged=7 * 10**9)
    step = replace(STEP, decoders={"actor": LARGE, "reference": LARGE}, hosts={"reference": "actor"})
    step = replace(step, engines={"actor": adapted}, whole=frozenset({"actor"}), own=frozenset({"actor"}), stays=True)
    parts = step.parts(RATES, TEN)
    sizes = {name: (part.gathered, part.reduced) for name, part in parts.items() if part.gathered or part.reduced}
    assert sizes == {
        "gather actor": (2e8, 0),
        "gather actor unmerged": (14e9, 0),
        "train actor": (0, 4 * 2e8),  # its copy lends the weights
    }
    assert parts["step actor"].compute == pytest.approx(1e7 * ADAM / 1e12)
    # A copy that five hold together only draws, with all matrices merged anew; the rest goes through partitions.
    together = replace(step, whole=frozenset(), drawing=5).parts(RATES, TEN)
    assert together["gather actor"].gathered == 20e9 and together["gather actor unmerged"].gathered == 0
    assert together["tokens"].gathered == 0 < together["tokens"].exchange
    assert together["reference"].gathered == together["actor"].gathered == 4 * 20e9


def test_a_trunk_of_several_roles_reduces_once_for_all():
    trunk = replace(partitioned(LARGE), trains=10**8)
    step = replace(STEP, hosts=dict.fromkeys(("critic", "reference", "reward"), "actor"), engines={"actor": trunk})
    parts = step.parts(RATES, TEN)
    assert [parts[f"train {role}"].reduced for role in ("critic", "actor")] == [0, 4 * 2e8]
    assert [parts[f"train {role}"].gathered for role in ("critic", "actor")] == [8 * 20e9] * 2
    assert parts["step critic"].compute == 0 < parts["step actor"].compute


def test_texts_are_passes_of_the_actor():
    plain, mixed = (replace(STEP, texts=texts).parts(RATES, TEN) for texts in (False, True))
    assert mixed["train actor"].gathered == 2 * plain["train actor"].gathered
    assert mixed["train actor"].compute == 2 * plain["train actor"].compute
    assert mixed["train critic"] == plain["train critic"]


def test_states_on_the_host_cross_its_link_twice():
    on_gpu = STEP.parts(RATES, TEN)["step critic"]
    assert on_gpu.compute == pytest.approx(1e9 * ADAM / 1e12)
    slow = replace(RATES, host_link=1e10, host_adam=1e10)
    there = replace(STEP, offloaded=frozenset(FOUR)).parts(slow, TEN)
    assert there["step critic"].compute == pytest.approx(1e9 * (ADAM + 2 * 2) / 1e10)
    fetched = there["train critic"].transfer - STEP.parts(slow, TEN)["train critic"].transfer
    assert fetched == pytest.approx(8 * 2e9 / 1e10)


def test_sums_over_nodes_go_along_a_tree_where_that_is_fewer_steps():
    network = Link(1e10, 5e-6)
    nodes = Machines(replace(SHEET, link=Link(1e11, 2e-6)), gpus=8, nodes=16, network=network)
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


def test_few_ranks_are_timed_within_their_node():
    inner = MeasuredRanks(2, gathers=[(0, 0.001), (1000, 0.002)], reductions=[(0, 0.003), (1000, 0.004)])
    ranks = MeasuredRanks(
        4, [(0, 1.0), (1000, 2.0)], [(0, 3.0), (1000, 4.0)], scatters=[(0, 5.0), (1000, 6.0)], within=inner
    )
    assert (ranks.all_gather(1000, 2), ranks.all_gather(1000, 4), ranks.all_gather(1000)) == (0.002, 2.0, 2.0)
    assert (ranks.all_reduce(1000, 2), ranks.all_reduce(1000)) == (0.004, 4.0)
    assert ranks.reduce_scatter(1000) == 6.0


def test_gloos_trees_cross_more_often_than_they_have_to():
    assert tree_crossings(2, 1) == 1 / 2  # each of two ranks sends its half
    # Ranks 0 and 1 on one host, 2 and 3 on the other. Senders 0 and 1 cross twice to the second, sender 3 once: 0 sends
    # to 1 and 2, 1 to 3; 1 to 2 and 3, 2 to 0; 2 to 3 and 0, 3 to 1; 3 to 0 and 1, 0 to 2.
    assert tree_crossings(2, 2) == 5 / 4
    assert ring_crossings(2, 2) == 2 * 3 / 4 and ring_crossings(1, 4) == 0
