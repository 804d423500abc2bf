"""DeepSpeed in one process: joining the process group, what it does to an optimizer and to bad gradients, the size of
buffers, offloaded parameters, and which weights are gathered together.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from engine import distributed
from engine.errors import UserError
from engine.models.loading import load_policy, load_scorer
from engine.rlhf_engine import EngineSpec, OptimizerSpec, frozen_model, trained_model
from engine.zero import communication, gathering, stages
from engine.zero.communication import init
from engine.zero.config import EngineConfig, chosen_stage, read_ds_file
from engine.zero.gathering import fill_parameters, is_available, parameter_buckets, whole_weights
from scripts.harness.models import make_causal_lm, make_scorer
from tests.engine.meters import HostQuestions, LiveBytes
from tests.engine.zero.inspecting import masters, weights
from tests.engine.zero.shard_memory import InMemory, whole

LR = 1e-2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    init()
    return make_causal_lm(tmp_path_factory.mktemp("actor"))


def build(folder, dtype, weight_decay=0.0, stage=0, **choice):
    spec = EngineSpec(actor_path=folder, critic_path="", dtype=dtype)
    return trained_model(
        load_policy,
        folder,
        EngineConfig("actor", stage, **choice),
        OptimizerSpec(lr=LR, weight_decay=weight_decay, max_grad_norm=0.0),
        spec,
    )


def one_step(model, factor=1.0):
    tokens = torch.arange(4, 20).view(2, 8)
    ones = torch.ones_like(tokens)
    logprobs, _ = model(tokens, ones, ones.cumsum(-1) - 1, response_length=5)
    model.backward(logprobs.sum() * factor, last=True)
    return model.overflowed()


@pytest.mark.parametrize("dtype, how", [("fp32", {}), ("bf16", {}), ("fp32", {"stage": 2, "offload": True})])
def test_adams_first_step_moves_each_weight_by_the_learning_rate(folder, dtype, how):
    """m / (sqrt(v) + eps) is the gradient's sign at step 1; a step taken before it would make that 0.735."""
    model = build(folder, dtype, **how)
    assert not one_step(model, factor=-1.0) and not model.step(LR, skip=True)  # kept, it would leave no gradient
    before = [shard.clone() for shard in model.master_shards()]
    assert not one_step(model)
    assert model.step(LR)
    moved = torch.cat([(new - old).abs().flatten() for new, old in zip(model.master_shards(), before)])
    moved = moved[moved > 0]
    assert len(moved) > 1000
    assert moved.median().item() == pytest.approx(LR, rel=1e-3)
    with model.swapped([shard.clone() for shard in before]):
        assert model.version == 2  # of which copies see that their weights are old


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_steps_that_are_dropped_leave_the_loss_scale(folder, monkeypatch, stage):
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    model = build(folder, "fp16", stage=stage)
    scale = model.loss_scale
    for _ in range(3):
        assert not one_step(model, factor=1e-6) and not model.step(LR, skip=True)
    assert model.loss_scale == scale


def test_masters_are_the_loaded_weights_however_large_the_decay(folder):
    model = build(folder, "bf16", weight_decay=0.5)
    weights = [p.detach().float().flatten() for p in model.module.parameters()]
    masters = [shard.flatten() for shard in model.master_shards()]
    assert torch.equal(torch.cat(weights).sort().values, torch.cat(masters).sort().values)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_is_seen_before_the_step(folder, dtype, monkeypatch):
    model = build(folder, dtype)
    with monkeypatch.context() as another:
        another.setattr(distributed, "any_rank", lambda own: True)
        assert one_step(model) and not model.weights_finite()
    assert one_step(model, factor=float("inf"))
    assert not model.scales_loss


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_restart_takes_moments_from_the_checkpoint_and_decay_from_the_run(folder, dtype):
    """p <- p (1 - lr decay) - lr m / sqrt(v): with the same moments the decay is all that differs, in matrices."""
    first = build(folder, dtype)
    one_step(first)
    first.step(LR)
    source, scalars = InMemory(whole(first.shards())), first.scalars()
    shards = {}
    for decay in (0.0, 0.5):
        model = build(folder, dtype, weight_decay=decay)
        model.load_shards(source, scalars)
        before = [shard.clone() for shard in model.master_shards()]
        one_step(model)
        model.step(LR)
        shards[decay] = [shard.clone() for shard in model.master_shards()]
    for start, plain, decayed in zip(before, shards[0.0], shards[0.5]):
        expected = plain - LR * 0.5 * start if start.dim() > 1 else plain
        torch.testing.assert_close(decayed, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_one_gpus_usual_stage_learns_as_stage_0(folder, tmp_path, monkeypatch, dtype):
    """The first step differs by rounding in float32. After it a weight may be rounded to the other one of two
    neighbours in 16 bits, which in bf16 differ by 2**-7 of it. The weights of another step are farther away."""
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    found = {}
    for stage in (0, chosen_stage(None, None, "actor", dtype, gpus=1)):
        path = tmp_path / f"{stage}.json"
        path.write_text(json.dumps({"zero_optimization": {"stage": stage}, "fp16": {"initial_scale_power": 8}}))
        model = build(folder, dtype, weight_decay=0.5, stage=stage, path=str(path))
        found[stage] = []
        for step in range(4):
            assert not one_step(model, factor=1 + step) and model.step(LR)
            found[stage].append((model.grad_norm, masters(model), weights(model)))
    assert sorted(found) == [0, 1]
    for step, ((norm, exact, rounded), (own_norm, own_exact, own_rounded)) in enumerate(zip(found[0], found[1])):
        close = {"rtol": 1e-6, "atol": 1e-6 * LR} if step == 0 else {"rtol": 2**-7, "atol": 2**-7 * LR}
        assert own_norm == pytest.approx(norm, rel=close["rtol"])
        for name, master in exact.items():
            torch.testing.assert_close(own_exact[name], master, **close)
            torch.testing.assert_close(own_rounded[name], rounded[name], rtol=2**-7, atol=2**-7 * LR)
            with pytest.raises(AssertionError):
                torch.testing.assert_close(own_exact[name], found[0][step - 1][1][name], **close)


def test_an_update_on_one_gpu_asks_no_question_for_each_weight(tmp_path):
    """Each of a layer's 9 weights takes two kernels in the norm, one that casts and one that reads."""
    init()
    counted = []
    for layers in (2, 4):
        path = make_causal_lm(tmp_path / f"{layers}", layers=layers)
        model = build(path, "bf16", stage=chosen_stage(None, None, "actor", "bf16", gpus=1))
        one_step(model)
        model.step(LR)
        with HostQuestions() as backward:
            one_step(model)
        with HostQuestions() as meter:
            model.overflowed()
            model.step(LR)
        counted.append((backward.count, meter.count, meter.operations))
    (backward, questions, operations), (more_backward, more_questions, more_operations) = counted
    assert (more_backward, more_questions) == (backward, questions)
    assert more_operations - operations <= 2 * 2 * 9


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_small_model_has_small_buffers(tmp_path, stage):
    init()
    path = make_causal_lm(tmp_path / "model")
    spec, choice = EngineSpec(actor_path=path, critic_path=""), EngineConfig("actor", stage)
    with LiveBytes() as meter:
        model = trained_model(load_policy, path, choice, OptimizerSpec(lr=1e-3), spec)
        tokens = torch.arange(4, 20).view(2, 8)
        ones = torch.ones_like(tokens)
        logprobs, _ = model(tokens, ones, ones.cumsum(-1) - 1, response_length=5)
        model.backward(logprobs.sum(), last=True)
        assert not model.overflowed() and model.step(1e-3)
    size = sum(shard.nbytes for shard in model.master_shards())
    assert 4 * read_ds_file(choice)["zero_optimization"]["reduce_bucket_size"] > 1000 * size  # as the file has it
    assert meter.peak < 20 * size


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("role", ["reference", "reward"])
def test_their_bytes(tmp_path, monkeypatch, role, offload):
    """Counted where DeepSpeed asks for pinned host memory, since on a CPU each place is host memory."""
    init()
    pinned = []
    monkeypatch.setattr(get_accelerator(), "pin_memory", lambda tensor, *args: pinned.append(tensor.nbytes) or tensor)
    make, load = (make_causal_lm, load_policy) if role == "reference" else (make_scorer, load_scorer)
    path, spec = make(tmp_path / "model"), EngineSpec(actor_path="", critic_path="")
    model = frozen_model(load, path, EngineConfig(role, 3, offload), spec)
    shards = [parameter.ds_tensor for parameter in model.module.parameters()]
    assert sum(pinned) == (sum(shard.nbytes for shard in shards) if offload else 0)


def test_an_offloaded_model_goes_to_the_device_and_nothing_comes_back(tmp_path, monkeypatch):
    """`cpu:0` stands for a GPU: what is sent there is copied, and the copy is other memory than the host's."""
    init()
    path, spec = make_causal_lm(tmp_path / "model", tied=True), EngineSpec(actor_path="", critic_path="")
    tokens = torch.arange(4, 20).view(2, 8)
    ones = torch.ones_like(tokens)

    def logprobs(model) -> torch.Tensor:
        return model(tokens, ones, ones.cumsum(-1) - 1, response_length=5)[0]

    def addresses() -> list[int]:
        return [parameter.data_ptr() for parameter in model.module.parameters()]

    expected = logprobs(frozen_model(load_policy, path, EngineConfig("reference", 0), spec))
    monkeypatch.setattr(distributed, "device", lambda: torch.device("cpu", 0))
    model = frozen_model(load_policy, path, EngineConfig("reference", 0, offload=True), spec)
    at_home = addresses()
    assert len({parameter.untyped_storage().data_ptr() for parameter in model.module.parameters()}) == 1
    for _ in range(2):
        with model.on_device():
            assert torch.equal(logprobs(model), expected)
        assert addresses() == at_home and not model.module.training
    with LiveBytes() as meter:
        with model.on_device():
            assert set(addresses()).isdisjoint(at_home)
            assert meter.live == sum(parameter.nbytes for parameter in model.module.parameters())
        assert meter.live == 0
    model.take(lambda name: torch.tensor(0.5))
    with model.on_device():
        assert all((parameter == 0.5).all() for parameter in model.module.parameters())


@pytest.mark.parametrize("visible, told", [(None, r"sees 1 GPU: "), ("3", r"sees 1 GPU \(CUDA_VISIBLE_DEVICES=3\): ")])
def test_a_rank_that_does_not_see_its_gpu(visible, told, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": visible}.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    gpu = SimpleNamespace(device_name=lambda: "cuda", device_count=lambda: 1)
    monkeypatch.setattr(communication, "get_accelerator", lambda: gpu)
    monkeypatch.setattr(communication.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(communication.distributed, "rank", lambda: 9)
    with pytest.raises(UserError, match=f"^rank 9 has LOCAL_RANK 1 and {told}"):
        communication.init()


def test_a_bucket_is_never_exceeded_but_by_one_weight(monkeypatch):
    monkeypatch.setattr(gathering, "GATHER_BUCKET", 10)
    sizes = {"a": 4, "b": 6, "c": 3, "d": 25, "e": 9, "f": 2}
    module = nn.ParameterDict({name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()})

    def names(*chosen: str) -> list[str]:
        return ["".join(name for name, _ in bucket) for bucket in parameter_buckets(module, chosen or None)]

    assert names() == ["ab", "c", "d", "e", "f"]
    assert names("a", "c", "f") == ["acf"]
    assert names("d", "f") == ["d", "f"]


def test_what_stays_gathered_is_gathered_anew_when_masters_change(folder, tmp_path):
    path = tmp_path / "vectors_stay.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 40}}))
    model = build(folder, "fp32", stage=3, path=str(path))
    assert not one_step(model) and model.step(LR)
    stays, before = model.ds_engine.optimizer.persistent_parameters, weights(model)
    assert stays and all(map(is_available, stays))
    with model.swapped([2 * shard for shard in model.master_shards()]):
        assert all(map(is_available, stays))
        assert all(torch.equal(weight, 2 * before[name]) for name, weight in weights(model).items())


def test_the_main_rank_alone_fetches_weights_and_whole_ones_outlive_their_gathering(folder, monkeypatch):
    spec = EngineSpec(actor_path="", critic_path="")
    module = frozen_model(load_policy, folder, EngineConfig("reference", 3), spec).module.model
    fill_parameters(module, lambda name: torch.tensor(0.5))
    monkeypatch.setattr(gathering, "_has_shard", lambda parameter: False)  # as of weights that are stored quantized
    assert all(weight.numel() and (weight == 0.5).all() for _, weight in list(whole_weights(module)))
    monkeypatch.setattr(distributed, "is_main", lambda: False)
    fill_parameters(module, pytest.fail)


def test_of_5_numbers_the_last_of_4_ranks_has_none(monkeypatch):
    """Two numbers on each of two ranks, then one and its padding, then padding alone. At stages 1 and 2 a rank has 4
    numbers of two weights' 8, of which 5 are the second's."""
    rows, module = torch.tensor([[1.0, 2], [3, 4], [5, 0], [0, 0]]), nn.ParameterDict({"w": torch.zeros(5)})
    monkeypatch.setattr(gathering, "_gathered_runs", lambda parameters: iter([rows]))
    monkeypatch.setattr(gathering, "_has_shard", lambda parameter: True)
    assert dict(whole_weights(module))["w"].tolist() == [1, 2, 3, 4, 5]
    parts, runs, pair = [], [], [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(5))]
    weight = SimpleNamespace(ds_tensor=SimpleNamespace(ds_numel=2), ds_numel=5)
    for rank in range(4):
        monkeypatch.setattr(distributed, "rank", lambda: rank)
        parts.append([(span.start, span.offset, span.length) for span in stages._spans_of_runs([weight] * 2)])
        runs.append([(span.start, span.offset, span.length) for span in stages._spans_within(pair, [0, 3], 4)])
    assert parts == [[(0, 0, 2), (0, 2, 2)], [(2, 0, 2), (2, 2, 2)], [(4, 0, 1), (4, 2, 1)], []]
    assert runs == [[(0, 0, 3), (0, 3, 1)], [(1, 0, 4)], [], []]
