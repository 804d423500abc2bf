"""Seconds of a step's exchanges as preflight tells them, by hand."""

from engine.speed.part import Part
from training.preflight import communication
from training.preflight.bandwidth import ALL_GATHER, ALL_REDUCE, Measured

GATHERS, SUMS = Measured(ALL_GATHER, 4, {100: 1.0, 1100: 2.0}), Measured(ALL_REDUCE, 4, {100: 3.0, 1100: 5.0})


def test_ranks_take_what_was_measured_within_a_node_that_of_the_slowest():
    slow = [Measured(ALL_REDUCE, 2, {100: 0.3, 1100: 0.5}), Measured(ALL_GATHER, 2, {100: 0.1, 1100: 0.2})]
    fast = [Measured(one.kind, 2, {size: seconds / 2 for size, seconds in one.seconds.items()}) for one in slow]
    ranks = communication.ranks_as_measured([SUMS, GATHERS], [fast, slow])
    assert ranks.world == 4 and ranks.within.world == 2
    assert (ranks.all_gather(600), ranks.all_reduce(600)) == (1.5, 4.0)
    assert (ranks.all_gather(1100, 2), ranks.all_reduce(1100, 2)) == (0.2, 0.5)
    assert ranks.reduce_scatter(600) == 4.0  # gloo sums all of a tensor
    assert communication.ranks_as_measured([SUMS, GATHERS], []).within is None


def test_with_nccl_sums_are_scattered_in_the_time_of_a_gather(monkeypatch):
    monkeypatch.setattr(communication, "on_gpu", lambda: True)
    assert communication.ranks_as_measured([SUMS, GATHERS], []).reduce_scatter(600) == 1.5


def test_parts_are_told_with_their_bytes():
    parts = {
        "gather actor": Part(0.0, 1.0, 4.0, gathered=700),
        "prompts": Part(7.0),
        "train actor": Part(0.0, 1.0, 1.5, gathered=2e6, reduced=1e6),
        "agree on rollouts": Part(latency=0.5),
        "critic": Part(latency=0.25),
    }
    assert communication.lines(parts) == [
        "communication of a step, by planned volumes and measured bandwidth: 8.25 s",
        "  5 s: gather actor, 700 B gathered",
        "  2.5 s: train actor, 2.0 MB gathered, 1.0 MB summed",
        "  0.5 s: agree on rollouts",
        "  0.25 s: experience of critic",
    ]
    assert communication.lines({"train": Part()}) == ["communication of a step: none but of metrics"]
