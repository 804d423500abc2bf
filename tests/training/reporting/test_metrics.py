"""The Accumulator: values by hand in one process, and over two processes with unequal counts; what a step's experience
tells beside its means; what tensors take of a GPU by phase.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from engine import distributed
from training.reporting import step_metrics
from training.reporting.metrics import Accumulator
from training.reporting.step_metrics import PhaseMemory, StepLog, peak_memory_gb


def test_mean_is_the_sum_of_totals_over_the_sum_of_counts():
    metrics = Accumulator()
    metrics.add("policy/loss", torch.tensor(6.0), torch.tensor(2))
    metrics.add("policy/loss", 1.0, 8)
    assert metrics.reduce() == {"policy/loss": 0.7}  # 7 / 10; the mean of 3 and 0.125 would be 1.5625


def test_a_metric_without_items_gives_no_entry():
    metrics = Accumulator()
    metrics.add("eval/score", 0.0, 0)
    metrics.add_moments(torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool), mean="a", std="b", variance="c")
    metrics.add_explained_variance("d", torch.ones(1, 2), torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool))
    assert metrics.reduce() == {}
    assert Accumulator().reduce() == {}


def test_reduce_leaves_what_was_added():
    metrics = Accumulator()
    metrics.add("x", 3.0, 2)
    assert metrics.reduce() == metrics.reduce() == {"x": 1.5}


def test_sum_max_and_min():
    metrics = Accumulator()
    for value in (2.0, 5.0, -1.0):
        metrics.add_sum("rollout/degenerate", value)
        metrics.add_max("policy/ratio_max", torch.tensor(value))
        metrics.add_min("rollout/ratio_min", torch.tensor(value))
    assert metrics.reduce() == {"policy/ratio_max": 5.0, "rollout/degenerate": 6.0, "rollout/ratio_min": -1.0}


def test_nan_maximum_shows_as_infinity_whatever_comes_after():
    metrics = Accumulator()
    metrics.add_max("x", torch.tensor(float("nan")))
    metrics.add_max("x", 3.0)
    metrics.add_min("y", float("nan"))
    metrics.add_min("y", 3.0)
    assert metrics.reduce() == {"x": math.inf, "y": -math.inf}


def test_moments_over_two_micro_batches_ignore_padding():
    metrics = Accumulator()
    mask = torch.tensor([[True, True, False]])
    for values in ([[1.0, 2.0, float("nan")]], [[3.0, 6.0, 1e9]]):
        metrics.add_moments(torch.tensor(values), mask, mean="m", std="s", variance="v")
    # 1 2 3 6: mean 3, squared distances 4 1 0 9, their mean 3.5
    assert metrics.reduce() == pytest.approx({"m": 3.0, "s": math.sqrt(3.5), "v": 3.5}, rel=1e-12)


def test_variance_of_equal_values_is_zero_not_rounding():
    metrics = Accumulator()
    for name, value in (("below", 0.7), ("above", 1.1)):  # squares / 77 - mean^2 is -1.7e-16 and 4.4e-16 here
        values = torch.full((7, 11), value, dtype=torch.float64)
        metrics.add_moments(values, torch.ones(7, 11, dtype=torch.bool), std=f"{name} s", variance=f"{name} v")
    assert metrics.reduce() == {"above s": 0.0, "above v": 0.0, "below s": 0.0, "below v": 0.0}


def test_infinite_squares_do_not_pass_for_no_variance():
    metrics = Accumulator()
    metrics.add_moments(torch.tensor([1e200, -1e200], dtype=torch.float64), torch.ones(2), variance="v")
    assert metrics.reduce() == {"v": math.inf}


def test_explained_variance():
    mask = torch.tensor([[True, True, True, False]])
    returns = torch.tensor([[0.0, 3.0, 6.0, 100.0]])  # variance 6
    metrics = Accumulator()
    metrics.add_explained_variance("perfect up to an offset", returns + 5.0, returns, mask)
    metrics.add_explained_variance("constant", torch.full((1, 4), 2.0), returns, mask)
    metrics.add_explained_variance("some", torch.tensor([[0.0, 0.0, 6.0, -9.0]]), returns, mask)  # errors 0 3 0: 2
    metrics.add_explained_variance("worse", -returns, returns, mask)  # errors 0 6 12: variance 24
    metrics.add_explained_variance("undefined", returns, torch.full((1, 4), 0.1), mask)
    expected = {"constant": 0.0, "perfect up to an offset": 1.0, "some": 1 - 2 / 6, "worse": -3.0}
    assert metrics.reduce() == pytest.approx(expected, abs=1e-12)


def test_slope_of_what_followed_on_values():
    mask = torch.tensor([[True, True, True, False]])
    values = torch.tensor([[0.0, 1.0, 2.0, -9.0]])  # mean 1, variance 2/3
    metrics = Accumulator()
    metrics.add_slope("right up to a constant", values, values + 7.0, mask)
    metrics.add_slope("too far apart", values, values / 4, mask)
    metrics.add_slope("by least squares", values, torch.tensor([[0.0, 0.0, 3.0, 5.0]]), mask)  # covariance 2 - 1
    metrics.add_slope("undefined", torch.full((1, 4), 0.1), values, mask)
    expected = {"right up to a constant": 1.0, "too far apart": 0.25, "by least squares": 1.5}
    assert metrics.reduce() == pytest.approx(expected, abs=1e-12)


def test_adding_keeps_no_graph_and_sums_in_float64():
    metrics = Accumulator()
    total = torch.tensor(2.0**24, requires_grad=True)
    metrics.add("x", total, 1)
    for _ in range(3):
        metrics.add("x", torch.tensor(1.0), 0)  # float32 would lose each of these
    assert metrics.reduce() == {"x": 2.0**24 + 3}
    assert not any(part.requires_grad for part in metrics._parts["x"] if isinstance(part, torch.Tensor))


def test_adding_tensors_does_not_read_them(monkeypatch):
    def read(self, *_):
        raise AssertionError("a tensor was read, which waits for the device")

    for name in ("item", "tolist", "__float__", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, read)
    metrics = Accumulator()
    for _ in range(2):
        metrics.add("a", torch.tensor(1.0), torch.tensor(2))
        metrics.add_max("b", torch.tensor(1.0))
        metrics.add_moments(torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool), std="c")
        metrics.add_explained_variance("d", torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool))


def test_broken_use_is_an_assertion_with_its_numbers():
    metrics = Accumulator()
    metrics.add("x", 1.0, 1)
    with pytest.raises(AssertionError, match="x was added as mean and now as max"):
        metrics.add_max("x", 1.0)
    with pytest.raises(AssertionError, match=r"shape \(3,\)"):
        metrics.add("y", torch.ones(3), 3)
    with pytest.raises(AssertionError, match=r"\(2, 3\) and mask \(2, 1\)"):
        metrics.add_moments(torch.ones(2, 3), torch.ones(2, 1), mean="z")


def _rank(rank: int, folder: str) -> None:
    """One of two processes; rank 1 has seen less, other names, and in the last case nothing at all."""
    distributed.device()  # imports deepspeed, before there is a group that default arguments in torch would keep alive
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    metrics = Accumulator()
    metrics.add("loss", [12.0, 1.0][rank], [3, 1][rank])
    metrics.add_max("ratio_max", [1.5, 1.25][rank])
    values = torch.tensor([[1.0, 2.0, 3.0], [6.0, -50.0, -50.0]][rank])
    mask = torch.tensor([[True, True, True], [True, False, False]][rank])
    metrics.add_moments(values, mask, mean="mean", variance="var")
    metrics.add_explained_variance("explained", torch.zeros(3), values, mask)
    metrics.add_sum("events", rank + 1)
    metrics.add("nowhere", 0.0, 0)
    if rank == 1:
        metrics.add("only_1", 4.0, 2)
        metrics.add_max("nan_max", float("nan"))
    else:
        metrics.add_max("nan_max", 3.0)
        metrics.add_max("only_0", -2.0)
    results = [metrics.reduce()]

    metrics = Accumulator()
    if rank == 0:
        metrics.add("loss", 3.0, 2)
    results.append(metrics.reduce())

    metrics = Accumulator()
    (metrics.add_max if rank else metrics.add_sum)("x", 1.0)
    try:
        metrics.reduce()
    except AssertionError as error:
        results.append(str(error))
    with Path(folder, f"{rank}.json").open("w") as file:
        json.dump(results, file)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_with_unequal_counts_and_names(tmp_path):
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    reduced, one_sided, clash = first
    assert reduced == pytest.approx(
        {
            "loss": 13 / 4,  # the mean of the ranks' means, 4 and 1, would be 2.5
            "ratio_max": 1.5,
            "mean": 3.0,  # 1 2 3 6; mean of means: 4
            "var": 3.5,  # mean of the ranks' variances: 1/3
            "explained": 0.0,  # a constant critic
            "events": 3.0,
            "only_1": 2.0,
            "only_0": -2.0,
            "nan_max": math.inf,
        },
        rel=1e-12,
    )
    assert one_sided == {"loss": 1.5}
    assert clash == "metric x is a max on rank 1 and a sum on a rank before it"


def test_distributions_hold_all_ranks(monkeypatch):
    mask = torch.tensor([[True, True, False], [True, False, False]])
    batch = SimpleNamespace(scores=torch.tensor([0.5, -1.0]), rollout=SimpleNamespace(actions=mask))
    other = {"objective/scores_histogram": torch.tensor([2.0]), "rollout/length_histogram": torch.tensor([3.0])}
    monkeypatch.setattr(step_metrics.distributed, "all_gather_objects", lambda own: [own, other])
    found = step_metrics.distributions(batch)
    assert {tag: values.tolist() for tag, values in found.items()} == {
        "objective/scores_histogram": [0.5, -1.0, 2.0],
        "rollout/length_histogram": [2.0, 1.0, 3.0],
    }


def test_the_samplers_distance_by_hand():
    # Of the actor over the sampler: ratios 4, 0.6, 1, and one that float32 cannot hold.
    metrics = Accumulator()
    step_metrics.add_sampler_distance(metrics, torch.tensor([math.log(4), math.log(0.6), 0.0, -200.0]))
    log4, log06 = math.log(4), math.log(0.6)
    assert metrics.reduce() == pytest.approx(
        {
            "rollout/logprob_gap": (log4 - log06 + 200) / 4,
            "rollout/sampler_kl": (-log4 - log06 + 200) / 4,
            "rollout/sampler_kl_k3": ((3 - log4) + (-0.4 - log06) + (math.exp(-20) - 1 + 20)) / 4,
            "rollout/ratio_min": math.exp(-20),
            "rollout/ratio_max": 4.0,
            "rollout/ratio_far": 0.5,  # 4 and e^-20
        },
        rel=1e-5,
    )


class Allocator:
    """A GPU's allocator, as far as it is asked."""

    def __init__(self, monkeypatch):
        self.held = self.peak = 0
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: setattr(self, "peak", self.held))

    def take(self, size: int) -> None:
        self.held += size
        self.peak = max(self.peak, self.held)


def test_on_a_gpu_each_phase_has_its_own_peak_and_the_run_the_largest(monkeypatch):
    gpu, memory = Allocator(monkeypatch), PhaseMemory()
    monkeypatch.setattr("training.reporting.step_metrics.on_gpu", lambda: True)
    monkeypatch.setattr("training.reporting.step_metrics.phase_memory", memory)
    monkeypatch.setattr("training.reporting.step_metrics.on_gpu", lambda: True)
    with memory.phase("before"):
        gpu.take(1000)
        gpu.take(-1000)
    assert memory.bytes == {}  # nothing is counted until it is asked for
    memory.counting, log = True, StepLog()
    with memory.phase("load"):
        gpu.take(9_000_000_000)
        gpu.take(-8_000_000_000)
    with log.phase("generate"):
        gpu.take(500_000_000)
    assert memory.bytes == {"load": 9_000_000_000, "generate": 1_500_000_000}
    assert peak_memory_gb() == 9.0  # of the whole run, though the count began anew
    memory.counting = False
    gpu.take(10_000_000_000)
    assert peak_memory_gb() == 11.5
