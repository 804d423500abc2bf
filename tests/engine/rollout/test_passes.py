"""Recorded passes and graphs of single tokens answer as the model does, for every number of sequences and positions,
or are not taken.

A stand-in for CUDA's capture holds what a CUDA graph holds: the operations of one run, on those very tensors.
"""

import contextlib
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
)

from engine.errors import UserError
from engine.experience import PromptBatch
from engine.models.checking import check_decoding
from engine.rollout.cache import SlotCache
from engine.rollout.decode import Sampler
from engine.rollout.passes import (
    GraphedPasses,
    Passes,
    RecordedPasses,
    _CudaCapture,
    _NoHostReads,
    _slots_of_shape,
    make_passes,
    rows_of_shape,
    takes_slot_masks,
    windows_of,
)
from scripts.harness.models import (
    BOS,
    EOS,
    PAD,
    VOCABULARY,
    make_causal_lm,
    make_tokenizer,
    save_random,
)
from scripts.harness.models import FAMILIES as CONFIGS
from tests.engine.rollout.test_decode import (
    BATCH,
    FAMILIES,
    INDICES,
    PROMPTS,
    READY,
    SAMPLING,
    answers,
    loaded,
    plainly,
)
from tests.fake_flash import FakeFlash
from tests.made import Made
from tests.plain_sampling import plain_answer

OTHERS = sorted(READY - {"llama"})
ANSWERED = [("llama", 3), ("llama", None), *((family, 3) for family in OTHERS)]
HALF = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
# Families whose layers attend to 8 slots, all of them or one of two; rows have up to 29 tokens.
WINDOWS = {name: CONFIGS[name] for name in ("mistral", "gemma3_text", "gemma2")} | {
    "gpt_oss": CONFIGS["gemma"] | HALF | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "cohere2": CONFIGS["llama"] | HALF,
    "exaone4": CONFIGS["llama"] | HALF,
    "qwen2": CONFIGS["llama"] | HALF | {"use_sliding_window": True},
    "starcoder2": CONFIGS["llama"] | {"sliding_window": 8},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict:
    return Made(lambda family: loaded(make_causal_lm(tmp_path_factory.mktemp(family), family)))


@pytest.fixture(scope="module")
def expected(models) -> dict:
    """Of each family, plain sampling's answers under SAMPLING to two samples of each of PROMPTS."""
    return Made(
        lambda family: [
            plain_answer(models[family], prompt, index, sample, SAMPLING)
            for prompt, index in zip(PROMPTS, INDICES)
            for sample in range(2)
        ]
    )


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> dict:
    return Made(lambda family: of_config(tmp_path_factory.mktemp(family), family, **WINDOWS[family]))


def of_config(folder, family: str, **config):
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **tokens, **config), dtype=torch.float32)
    return loaded(save_random(model, folder))


def taken(model: nn.Module, decoding: str) -> Passes:
    with torch.inference_mode():
        return make_passes(model, SlotCache(), takes_slot_masks(model), decoding)


@pytest.mark.parametrize("family, rows_at_once", ANSWERED)
def test_recorded_passes_answer_alike(models, expected, family, rows_at_once):
    """For any number of rows and slots, moved to the left or not, and with the weights as they are by then."""
    model, sampler = models[family], Sampler(make_tokenizer(), rows_at_once, decoding="recorded")
    calls = []
    hook = model.register_forward_pre_hook(
        lambda _, args, named: calls.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        assert answers(sampler.responses(model, BATCH, SAMPLING)) == expected[family][::2]
        assert type(sampler._passes) is RecordedPasses
        calls.clear()
        more = sampler.responses(model, BATCH.repeat(2), SAMPLING)
        single = calls.count(1)
    finally:
        hook.remove()
    assert answers(more) == expected[family]
    assert single < 5 < sampler.row_steps  # prompts of one token go through the model, and no other single token
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        for name, p in model.named_parameters():  # half are written to, half are put elsewhere
            moved = before[name] + 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
            if len(name) % 2:
                p.data.copy_(moved)
            else:
                p.data = moved
        changed = plainly(model, SAMPLING)
        assert changed != answers(more.select(more.samples == 0))
        assert answers(sampler.responses(model, BATCH, SAMPLING)) == changed
    finally:
        for name, p in model.named_parameters():
            p.data = before[name]


def test_chunks_are_left_to_the_models_own_code(tmp_path):
    config = CONFIGS["gemma"] | {"num_local_experts": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 8}
    model = of_config(tmp_path, "llama4_text", **config)
    assert set(windows_of(model)) == {"chunked_attention"}
    with pytest.warns(UserWarning, match="for Llama4ForCausalLM .it makes the mask of each token itself"):
        assert type(taken(model, "auto")) is Passes


def test_auto_records_on_cpus_and_says_where_it_cannot(models):
    for family in FAMILIES:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            passes = taken(models[family], "auto")
        assert type(passes) is (RecordedPasses if family in READY else Passes)
        assert (passes.decoding, passes.fallback) == (
            ("recorded", "") if family in READY else ("plain", "it makes the mask of each token itself")
        )
        assert len([each for each in said if "decoding recorded does not work" in str(each.message)]) == (
            family not in READY
        )


@pytest.mark.parametrize("family", ["llama", *OTHERS])
def test_a_padding_token_other_than_the_first_is_no_hindrance(family, tmp_path):
    """An embedding that is told of one looks at its own size."""
    model = loaded(make_causal_lm(tmp_path, family, pad_is_eos=True))
    assert model.config.pad_token_id == EOS > 0
    sampler = Sampler(make_tokenizer(pad_is_eos=True), decoding="auto")
    assert answers(sampler.responses(model, BATCH, SAMPLING)) == plainly(model, SAMPLING)
    assert type(sampler._passes) is RecordedPasses


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - READY))
@pytest.mark.parametrize("decoding", ("recorded", "graphs"))
def test_families_that_need_their_own_masks_are_named(models, family, decoding):
    with pytest.warns(UserWarning, match=f"decoding {decoding} does not work for {type(models[family]).__name__}"):
        assert type(taken(models[family], decoding)) is Passes


class Odd(nn.Module):
    """A model whose code does something that no recording holds."""

    def __init__(self, model: nn.Module, oddity):
        super().__init__()
        self.model, self.oddity, self.config = model, oddity, model.config

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, **named):
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **named,
        )
        output.logits = self.oddity(output.logits, position_ids)
        return output


@pytest.mark.parametrize(
    "oddity, reason",
    [
        (lambda logits, positions: -logits if positions.max() > 40 else logits, "branches on computed numbers"),
        (lambda logits, positions: logits + logits.sum().item(), "branches on computed numbers"),
        (lambda logits, positions: logits * (2.0 if torch.jit.is_tracing() else 1.0), "gives other results"),
        (lambda logits, positions: logits if not torch.jit.is_tracing() else next(iter(())), "StopIteration"),
        (
            lambda logits, positions: logits.reshape(
                logits.untyped_storage().nbytes() // (4 * logits.shape[-1]), 1, -1
            ),
            "its recording (fails|gives other results)",
        ),
    ],
)
def test_code_that_no_recording_holds_is_found_out(models, oddity, reason):
    """It goes by what it computes, which in the first case no trial would show; by who asks; or by shapes."""
    model = Odd(models["llama"], oddity).eval()
    with pytest.warns(UserWarning, match=reason):
        assert type(taken(model, "recorded")) is Passes


def test_eager_attention_adds_masks_to_its_scores(tmp_path):
    """Masks of booleans would hide nothing."""
    model = AutoModelForCausalLM.from_pretrained(
        make_causal_lm(tmp_path, "llama"), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    sampler = Sampler(make_tokenizer(), decoding="auto")
    assert answers(sampler.responses(model, BATCH, SAMPLING)) == plainly(model, SAMPLING)
    assert sampler.decoding_ran == "recorded"


QUICK = [("gpt_oss", "recorded"), ("mistral", "graphs")]


@pytest.mark.parametrize(
    "name, decoding",
    QUICK
    + [
        pytest.param(name, decoding, marks=pytest.mark.slow)
        for name in WINDOWS
        for decoding in ("recorded", "graphs")
        if (name, decoding) not in QUICK
    ],
)
@torch.no_grad()
def test_windows_that_are_shorter_than_rows(windowed, name, decoding):
    """Rows of different lengths join and leave; what the finished rows get is their whole pass by transformers."""
    model, how = windowed[name], replace(SAMPLING, logprob_temperature=1.0)
    if decoding == "graphs":
        sampler = sampler_with(model, Captured(), 3)
    else:
        sampler = Sampler(make_tokenizer(), 3, decoding=decoding)
    rollout = sampler.responses(model, BATCH, how)
    assert sampler.decoding_ran == decoding and not sampler.fallback
    assert answers(rollout) == plainly(model, SAMPLING)
    for row, (tokens, _) in enumerate(answers(rollout)):
        logits = model(torch.tensor([PROMPTS[row] + tokens])).logits[0, len(PROMPTS[row]) - 1 : -1]
        expected = torch.log_softmax(logits, -1)[range(len(tokens)), tokens]
        torch.testing.assert_close(rollout.logprobs[row, : len(tokens)], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ("mistral", "gemma3_text", "gpt_oss"))
@pytest.mark.parametrize("change", (-1, 0, 1))
@torch.no_grad()
def test_windows_that_are_off_by_one_are_refused(windowed, monkeypatch, name, change):
    def wrong(model):
        return {kind: window and window + change for kind, window in windows_of(model).items()}

    monkeypatch.setattr("engine.rollout.passes.windows_of", wrong)
    assert takes_slot_masks(windowed[name]) == (change == 0)


def test_the_slots_that_a_window_hides(windowed):
    """A token in slot 4 and a window of 3: slots 2, 3 and 4."""
    passes = Passes(
        windowed["gemma3_text"], SimpleNamespace(tensors=lambda: [torch.zeros(1, dtype=torch.float16)]), True
    )
    passes.windows = {"full_attention": None, "sliding_attention": 3, "long": 5, "longer": 50}
    mask = torch.tensor([[False, True, True, True, True, False], [False, False, False, True, True, False]])
    seen = {kind: (each[:, 0, 0] == 0).tolist() for kind, each in passes.masks(mask, 4).items()}
    assert seen["sliding_attention"] == [[False, False, True, True, True, False], mask[1].tolist()]
    assert seen["full_attention"] == seen["long"] == seen["longer"] == mask.tolist()


@pytest.mark.parametrize(
    "name, config, windows",
    [
        ("mistral", {"sliding_window": None}, {"full_attention": None}),
        ("mistral", {"sliding_window": 7}, {"sliding_attention": 7}),
        ("qwen2_moe", {"sliding_window": 7}, {"full_attention": None}),  # of which transformers makes 0
        ("gemma2", HALF | {"num_hidden_layers": 2}, {"full_attention": None, "sliding_attention": 8}),
        ("gemma2", HALF | {"num_hidden_layers": 2, "sliding_window": 0}, dict.fromkeys(HALF["layer_types"])),
    ],
)
def test_windows_of_configurations(name, config, windows):
    assert windows_of(SimpleNamespace(config=AutoConfig.for_model(name, **config))) == windows


def test_flash_attention_answers_as_torchs_own(models, expected, monkeypatch):
    """A token's mask has holes where rows came and went; it is told of them as of padding."""
    expected = expected["llama"][::2]  # before attention is replaced
    flash = FakeFlash(monkeypatch)
    monkeypatch.setattr(models["llama"].config, "_attn_implementation_internal", "flash_attention_2")
    assert not takes_slot_masks(models["llama"])
    sampler = Sampler(make_tokenizer(), rows_at_once=5, decoding="plain")
    assert answers(sampler.responses(models["llama"], BATCH, SAMPLING)) == expected
    assert len(flash.calls) > 40 and {longest for _, longest in flash.calls} > {1}


@pytest.mark.parametrize(
    "config", (RwkvConfig(), RecurrentGemmaConfig(), MiniMaxConfig()), ids=lambda config: config.model_type
)
def test_actors_that_keep_states_outside_of_transformers_cache_are_refused(tmp_path, config):
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"^--actor: .* is a {config.model_type} model. Some of its layers keep what "):
        check_decoding(str(tmp_path), "--actor")


def test_a_sampler_at_rest_holds_neither_the_model_nor_memory(models, expected):
    sampler = Sampler(make_tokenizer(), decoding="recorded")
    sampler.responses(models["llama"], BATCH, SAMPLING)
    sampler.release_memory()
    assert sampler._passes is None and not sampler.cache.layers
    assert answers(sampler.responses(models["llama"], BATCH, SAMPLING)) == expected["llama"][::2]


ROOM = 100  # tokens of the longest row, which has 176 slots where others wait


class Captured:
    """Operations of aten on the tensors they were run on; no Python of the model runs again."""

    def __init__(self):
        self.count = 0

    def __call__(self, step):
        self.count += 1
        return make_fx(step)()


@pytest.fixture(scope="module")
def graphed_models(tmp_path_factory) -> dict:
    """The same models again."""
    return Made(lambda family: loaded(make_causal_lm(tmp_path_factory.mktemp(family), family)))


def sampler_with(model, capture, rows_at_once: int | None = None, row_length: int = 0) -> Sampler:
    sampler = Sampler(make_tokenizer(), rows_at_once, decoding="graphs", row_length=row_length)
    sampler.context = torch.no_grad  # the stand-in cannot trace inference tensors
    sampler._slot_masks, sampler._passes = True, GraphedPasses(model, sampler.cache, True, capture)
    return sampler


@pytest.mark.parametrize("family, rows_at_once", ANSWERED)
def test_graphs_answer_alike(graphed_models, expected, family, rows_at_once):
    capture = Captured()
    sampler = sampler_with(graphed_models[family], capture, rows_at_once)
    assert answers(sampler.responses(graphed_models[family], BATCH, SAMPLING)) == expected[family][::2]
    captured = capture.count
    assert 1 <= captured <= 4 and sampler.decoding_ran == "graphs"  # at most quarters of the slots: rows are few
    calls = []
    hook = graphed_models[family].register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        assert answers(sampler.responses(graphed_models[family], BATCH, SAMPLING)) == expected[family][::2]
    finally:
        hook.remove()
    assert capture.count == captured and len(calls) < sampler.row_steps / 3  # the model itself reads prompts alone


@pytest.mark.slow
def test_weights_that_are_written_to_are_used_and_those_that_move_are_noticed(graphed_models):
    model = graphed_models["llama"]
    sampler = sampler_with(model, Captured())
    sampler._passes._new_capture = Captured  # graphs that are captured anew need a pool of their own
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sampler.responses(model, BATCH, SAMPLING)
    graphs = sampler._passes._graphs
    first, capture = dict(graphs), sampler._passes._capture
    try:
        torch.manual_seed(1)
        for p in model.parameters():
            p.data.add_(0.05 * torch.randn_like(p))
        assert answers(sampler.responses(model, BATCH, SAMPLING)) == plainly(model, SAMPLING)
        assert first and first.items() <= graphs.items() and sampler._passes._capture is capture
        for p in model.parameters():
            p.data = p.data + 0.05 * torch.randn_like(p)
        assert answers(sampler.responses(model, BATCH, SAMPLING)) == plainly(model, SAMPLING)
        assert graphs and not set(map(id, first.values())) & set(map(id, graphs.values()))
        assert sampler._passes._capture is not capture
    finally:
        for name, p in model.named_parameters():
            p.data = before[name]


def prompts(rows: int, width: int) -> PromptBatch:
    ids = torch.randint(4, 20, (rows, width), generator=torch.Generator().manual_seed(width))
    return PromptBatch(ids, torch.ones_like(ids), torch.arange(rows), torch.zeros(rows, dtype=torch.int64))


@pytest.mark.slow
def test_evaluations_have_fewer_rows_and_prompts_grow(graphed_models):
    """4 rows, 24 of which 8 wait, 4; of a run whose lengths are known each shape is captured once."""
    model, capture = graphed_models["llama"], Captured()
    sampler, plain = sampler_with(model, capture, 16, ROOM), Sampler(make_tokenizer())
    long = replace(SAMPLING, max_new_tokens=40, stop_token_ids=())
    for width in (3, 60):
        for rows in (4, 24, 4):
            batch = prompts(rows, width)
            found, expected = (each.responses(model, batch, long) for each in (sampler, plain))
            assert torch.equal(found.sequences, expected.sequences)
            hidden = sampler._passes._inputs.masks["full_attention"].isneginf()
            # What GPUs make of a row that sees nothing is NaN, so that free rows see everything.
            assert hidden[:4].any(-1).all() and hidden[4:].any() == (rows > 4)
    assert 2 <= capture.count <= 2 * 4  # 16 and 8 rows, quarters of the slots


@pytest.mark.slow
def test_a_cache_that_grows_where_it_stood_is_noticed(graphed_models, monkeypatch):
    """A freed block of a GPU's memory is given again, whole, to what is a little larger."""
    sampler, plain = sampler_with(graphed_models["llama"], Captured()), Sampler(make_tokenizer())
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 0)
    for rows, tokens in ((4, 20), (4, 50), (6, 50)):  # more slots, more rows
        batch, longer = prompts(rows, 3), replace(SAMPLING, max_new_tokens=tokens, stop_token_ids=())
        found, expected = (each.responses(graphed_models["llama"], batch, longer) for each in (sampler, plain))
        assert torch.equal(found.sequences, expected.sequences) and sampler.fallback == ""


def test_shapes_are_few():
    assert [rows_of_shape(living, 64) for living in (1, 8, 9, 16, 17, 33, 64)] == [8, 8, 16, 16, 32, 64, 64]
    assert [rows_of_shape(living, 12) for living in (1, 12)] == [12, 12] and rows_of_shape(2, 3) == 3
    assert [_slots_of_shape(slots, 768) for slots in (1, 192, 193, 577, 768)] == [192, 192, 384, 768, 768]
    assert [_slots_of_shape(slots, 176) for slots in (1, 49, 97, 145)] == [48, 96, 144, 176]  # 44 would be no 16s
    assert _slots_of_shape(1, 16) == 16


@pytest.mark.parametrize("width", [2.0, *(pytest.param(width, marks=pytest.mark.slow) for width in (0.4, 4.0))])
def test_right_graphs_are_told_from_wrong_ones_in_bf16_however_wide_logits_are(width):
    """Rounding differs between kernels by the shape of a pass: it is put here into the weights of the head, where it
    reaches each logit by itself."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval()
    batch = prompts(16, 12)
    with torch.no_grad():
        model.lm_head.weight.mul_(width / model(batch.input_ids).logits[:, -1].std())
    model = model.to(torch.bfloat16)
    assert model(batch.input_ids).logits[:, -1].float().std().item() == pytest.approx(width, rel=0.05)

    def rounded(step):
        output = step()
        return lambda: output * (1 + 2.0**-7 * torch.rand_like(output).sub(0.5))

    sampler = sampler_with(model, rounded)
    sampler.responses(model, batch, SAMPLING)
    assert sampler.fallback == "" and sampler.decoding_ran == "graphs"
    sampler = sampler_with(model, lambda step: lambda: step().roll(1, 0))  # each row has another's logits
    with pytest.warns(UserWarning, match="gives other results"):
        sampler.responses(model, batch, SAMPLING)
    assert sampler.fallback == "its graph gives other results" and sampler.decoding_ran == "plain"


@pytest.mark.parametrize("inference", (False, True))
def test_a_model_that_asks_the_device_is_not_captured(inference):
    """Dynamic RoPE looks at the largest position."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, rope_parameters=rope)).eval()
    capture = Captured()
    sampler = sampler_with(model, capture)
    sampler.context = torch.inference_mode if inference else torch.no_grad
    with pytest.warns(UserWarning, match="its code reads computed numbers on the host, by"):
        sampler.responses(model, prompts(4, 3), SAMPLING)
    assert capture.count == 0 and sampler.decoding_ran == "plain"


READS, COPIES = "reads computed numbers on the host", "copies between the host and the device"


@pytest.mark.parametrize("context", (torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize(
    "ask, reason",
    [
        (lambda x, device: x.sum().item(), READS),
        (lambda x, device: x[x > 0], READS),
        (lambda x, device: x.nonzero(), READS),
        (lambda x, device: x.repeat_interleave(x.long()), READS),
        (lambda x, device: torch.allclose(x, x), READS),
        (lambda x, device: x.index_put_((x > 0,), torch.zeros(1)), READS),
        (lambda x, device: x.index_put_((torch.tensor([1]),), torch.zeros(1)), None),
        (lambda x, device: x[torch.tensor([1, 0])], None),
        (lambda x, device: x.to("meta"), COPIES),
        (lambda x, device: device.cpu(), COPIES),
        (lambda x, device: device.copy_(x), COPIES),
        (lambda x, device: device[torch.tensor([1, 0])], COPIES),
        (lambda x, device: torch.ops.aten.lift_fresh(device), COPIES),  # the last operation of torch.tensor on a GPU
        (lambda x, device: device.fill_(x[0]), None),
        (lambda x, device: device.to(torch.float16).copy_(device), None),
        (lambda x, device: torch.arange(2, device="meta") + torch.zeros_like(x, device="meta"), None),
    ],
)
def test_what_no_graph_can_hold(ask, reason, context):
    """The meta device stands for a GPU."""
    with context():
        x, device = torch.tensor([1.0, 0.0]), torch.empty(2, device="meta")
        with pytest.raises(ValueError, match=reason) if reason else contextlib.nullcontext(), _NoHostReads():
            ask(x, device)


def test_the_allocator_is_told_of_a_capture_that_failed(monkeypatch):
    """Before torch 2.12 torch does not tell it; later versions refuse to tell it again."""
    told, streams = [], SimpleNamespace(device_index=3, wait_stream=lambda other: None)

    def end(device, pool):
        told.append((device, pool))
        raise RuntimeError("not currently recording")

    class Fails(contextlib.nullcontext):
        def __exit__(self, *error):
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    for name, stand_in in {
        "graph_pool_handle": lambda: (0, 7),
        "Stream": lambda: streams,
        "current_stream": lambda: streams,
        "stream": lambda stream: contextlib.nullcontext(),
        "CUDAGraph": object,
        "graph": lambda *args: Fails(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    with pytest.raises(RuntimeError, match="a previous error during capture"):
        _CudaCapture()(lambda: torch.zeros(1))
    assert told == [(3, (0, 7))]


@pytest.mark.parametrize(
    "capture, reason",
    [
        (lambda step: [].pop(), "pop from empty list"),
        (lambda step: lambda: step() + 1, "gives other results"),
    ],
)
def test_the_models_own_code_goes_on_where_a_capture_fails(graphed_models, expected, capture, reason):
    sampler = sampler_with(graphed_models["llama"], capture)
    assert sampler.fallback == "" and Sampler(make_tokenizer()).fallback is None
    with pytest.warns(UserWarning, match=f"decoding graphs does not work for LlamaForCausalLM .*{reason}") as caught:
        found = answers(sampler.responses(graphed_models["llama"], BATCH, SAMPLING))
    assert found == expected["llama"][::2]
    assert len(caught) == 1


def test_there_are_no_graphs_on_cpus(graphed_models):
    with pytest.warns(UserWarning, match="decoding graphs does not work .*not on a GPU"), torch.inference_mode():
        assert type(make_passes(graphed_models["llama"], Sampler(make_tokenizer()).cache, True, "graphs")) is Passes
