"""Graphs of single tokens answer as the model does, for every number of rows and slots, or are not taken.

A stand-in for CUDA's capture holds what a CUDA graph holds: the operations of one run, on those very tensors.
"""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from engine.rollout.decode import Sampler
from engine.rollout.decoding import passes_of
from engine.rollout.graphed_passes import GraphedPasses
from engine.rollout.passes import Passes
from tests.engine.rollout.test_decode import BATCH, READY, SAMPLING, answers, loaded, plainly
from tests.tiny_models import make_causal_lm, make_tokenizer


class Captured:
    """Operations of aten on the tensors they were run on; no Python of the model runs again."""

    def __init__(self):
        self.count = 0

    def __call__(self, step):
        self.count += 1
        return make_fx(step)()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict:
    return {family: loaded(make_causal_lm(tmp_path_factory.mktemp(family), family)) for family in READY}


def sampler_with(model, capture, rows_at_once: int | None = None) -> Sampler:
    sampler = Sampler(make_tokenizer(), rows_at_once)
    sampler.context = torch.no_grad  # the stand-in cannot trace inference tensors
    sampler._slot_masks, sampler._passes = True, GraphedPasses(model, sampler.cache, True, capture)
    return sampler


@pytest.mark.parametrize("family, rows_at_once", [("llama", None), *((family, 3) for family in sorted(READY))])
def test_graphs_answer_alike(models, family, rows_at_once):
    capture = Captured()
    sampler = sampler_with(models[family], capture, rows_at_once)
    expected = plainly(models[family], SAMPLING)
    assert answers(sampler.responses(models[family], BATCH, SAMPLING)) == expected
    captured = capture.count
    assert 2 <= captured <= 4 * 4  # quarters of the slots times 12, 6, 3 and 2 rows, or 3 and 2
    calls = []
    hook = models[family].register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        assert answers(sampler.responses(models[family], BATCH, SAMPLING)) == expected
    finally:
        hook.remove()
    assert capture.count == captured and len(calls) < sampler.row_steps / 3  # the model itself reads prompts alone


def test_weights_that_are_written_to_are_used_and_those_that_move_are_noticed(models):
    model = models["llama"]
    sampler = sampler_with(model, Captured())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sampler.responses(model, BATCH, SAMPLING)
    graphs = sampler._passes._graphs
    first = dict(graphs)
    try:
        torch.manual_seed(1)
        for p in model.parameters():
            p.data.add_(0.05 * torch.randn_like(p))
        assert answers(sampler.responses(model, BATCH, SAMPLING)) == plainly(model, SAMPLING)
        assert first and first.items() <= graphs.items()
        for p in model.parameters():
            p.data = p.data + 0.05 * torch.randn_like(p)
        assert answers(sampler.responses(model, BATCH, SAMPLING)) == plainly(model, SAMPLING)
        assert graphs and not set(map(id, first.values())) & set(map(id, graphs.values()))
    finally:
        for name, p in model.named_parameters():
            p.data = before[name]


def test_more_rows_than_before_are_captured_anew(models):
    model, capture = models["llama"], Captured()
    sampler = sampler_with(model, capture)
    sampler.responses(model, BATCH, SAMPLING)
    captured = capture.count
    more = sampler.responses(model, BATCH.repeat(2), SAMPLING)
    assert answers(more.select(more.samples == 0)) == plainly(model, SAMPLING) and capture.count > captured


@pytest.mark.parametrize(
    "capture, reason",
    [
        (lambda step: [].pop(), "pop from empty list"),
        (lambda step: lambda: step() + 1, "computes something else"),
    ],
)
def test_the_models_own_code_goes_on_where_a_capture_fails(models, capture, reason):
    sampler = sampler_with(models["llama"], capture)
    with pytest.warns(UserWarning, match=f"LlamaForCausalLM cannot be graphs .*{reason}") as caught:
        assert answers(sampler.responses(models["llama"], BATCH, SAMPLING)) == plainly(models["llama"], SAMPLING)
    assert len(caught) == 1


def test_there_are_no_graphs_on_cpus(models):
    with pytest.warns(UserWarning, match="cannot be graphs .*not on a GPU"), torch.inference_mode():
        assert type(passes_of(models["llama"], Sampler(make_tokenizer()).cache, True, "graphs")) is Passes
