"""Which code computes attention: that it is what was asked for wherever a model is made, and what is refused early.
Sequences without padding: log-probs, values and gradients are those of padded ones, for less arithmetic.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from engine.actor_copy import ActorCopy
from engine.errors import SharedError, UserError
from engine.experience import position_ids
from engine.models import attention as attention_module
from engine.models import loading
from engine.models.attention import BY_ROW, Attention, PackedRows, attention_in_words, has_kernel
from engine.models.config_and_tokenizer import CLASSIFIER, LANGUAGE_MODEL
from engine.models.hydra import load_hydra
from engine.models.loading import check_padding, load_policy, load_scorer, new_critic, new_scorer
from engine.models.lora import LoraSpec
from engine.models.saving import save_model
from engine.models.trunk import ScoringRole, make_trunk
from engine.rollout.passes import takes_slot_masks
from scripts.harness.models import (
    PAD,
    VOCABULARY,
    family_config,
    make_causal_lm,
    make_config,
    make_scorer,
    make_tokenizer,
    save_random,
)
from tests.fake_flash import FakeFlash
from tests.fake_varlen import FakeVarlen

EAGER = Attention("eager")


def implementation(made) -> str:
    return made.model.base_model.config._attn_implementation


def test_a_model_is_made_with_the_attention_that_was_asked_for_and_a_copy_has_it_too(tmp_path):
    path, scorer = make_causal_lm(tmp_path / "sft", "llama"), make_scorer(tmp_path / "reward", "llama")
    made = [
        load_policy(path, torch.float32, attention=EAGER),
        load_hydra(path, torch.float32, layers=1, attention=EAGER),
        load_scorer(scorer, torch.float32, attention=EAGER),
        new_scorer(path, torch.float32, PAD, 1, attention=EAGER),
    ]
    copies = [ActorCopy(SimpleNamespace(module=one, stage=3, version=0)).module() for one in made[:2]]
    assert [implementation(one) for one in made + copies] == ["eager"] * 6
    assert implementation(load_policy(path, torch.float32)) == "sdpa"


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flex_attention"])
def test_kernels_of_gpus_are_refused_on_cpus(tmp_path, kernel):
    path = make_causal_lm(tmp_path / "sft", "llama")
    with pytest.raises(UserError, match=f"^--attn_implementation {kernel}: it has kernels for GPUs alone.*give sdpa"):
        Attention(kernel).check(path, LANGUAGE_MODEL, "bf16", "--actor")


def test_flash_attention_is_refused_where_it_is_not_installed_or_the_dtype_is_not_its(tmp_path, monkeypatch):
    path = make_causal_lm(tmp_path / "sft", "llama")
    monkeypatch.setattr(attention_module, "on_gpu", lambda: True)
    with pytest.raises(UserError, match="the package flash-attn is not installed"):
        Attention("flash_attention_2").check(path, LANGUAGE_MODEL, "bf16", "--actor")
    monkeypatch.setattr(attention_module.import_utils, "is_flash_attn_2_available", lambda: True)
    with pytest.raises(UserError, match="computes in fp16 or bf16, and this run in fp32"):
        Attention("flash_attention_2").check(path, LANGUAGE_MODEL, "fp32", "--actor")
    Attention("flash_attention_2").check(path, LANGUAGE_MODEL, "bf16", "--actor")


def test_a_family_without_an_implementation_is_refused_with_those_that_it_has(tmp_path):
    path = make_causal_lm(tmp_path / "sft", "bloom")
    with pytest.raises(UserError, match="--actor .*of type 'bloom', of which .* no such attention.* or give eager\\."):
        Attention("sdpa").check(path, LANGUAGE_MODEL, "fp32", "--actor")
    Attention("auto").check(path, LANGUAGE_MODEL, "fp32", "--actor")
    Attention("eager").check(path, CLASSIFIER, "fp32", "--critic")


PADDED, PACKED = Attention("sdpa", "padded"), Attention("sdpa", "packed")
LENGTHS = [8, 96, 40, 17, 64, 9, 81, 30]  # tokens of each row, half of them the response's


def ragged(lengths: list[int]) -> tuple[Tensor, Tensor, int]:
    """(sequences, attention mask, response width): prompts padded on the left, responses on the right."""
    width = max(-(-length // 2) for length in lengths), max(length // 2 for length in lengths)
    mask = torch.zeros(len(lengths), sum(width), dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, width[0] - -(-length // 2) : width[0] + length // 2] = 1
    generator = torch.Generator().manual_seed(3)
    return torch.randint(4, VOCABULARY, mask.shape, generator=generator) * mask, mask, width[1]


def long_model(folder, family: str, scorer: bool = False, **settings) -> str:
    """A model with as many positions as the longest row has tokens, and no more. settings: of its configuration."""
    config = make_config(family)
    vars(config).update(settings)
    config.max_position_embeddings, config.num_labels = max(LENGTHS), 1
    kind = AutoModelForSequenceClassification if scorer else AutoModelForCausalLM
    return save_random(kind.from_config(config), folder)


def computed(policy, scorer, **how) -> dict[str, Tensor]:
    """What a policy and a scorer say of ragged rows where it counts, and the gradients of a loss on it, by name."""
    sequences, mask, width = ragged(LENGTHS)
    counted = mask[:, -width:].float()
    weights = torch.rand(counted.shape, generator=torch.Generator().manual_seed(4)) * counted
    given = sequences, mask, position_ids(mask)
    logprobs, entropy = policy(*given, response_length=width, temperature=0.7, with_entropy=True, **how)
    values = scorer(*given)[:, -width - 1 : -1]
    (((logprobs + values) * weights).sum() / counted.sum()).backward()
    found = {"logprobs": logprobs * counted, "entropy": entropy * counted, "values": values * counted}
    for kind, module in (("policy", policy), ("scorer", scorer)):
        found |= {f"{kind} {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    return found


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected) and len(found) > 20
    for name, tensor in expected.items():
        assert (tensor - found[name]).abs().max() <= 1e-5 * tensor.abs().max().clamp(min=1.0), name


@pytest.mark.parametrize("family", ["llama", "qwen2", "opt"])
def test_gradients_of_ragged_rows_are_those_of_padded_ones_for_half_the_arithmetic(tmp_path, family):
    paths = long_model(tmp_path / "sft", family), long_model(tmp_path / "rm", family, scorer=True)
    found, arithmetic = {}, {}
    for attention in (PADDED, PACKED):
        models = [
            load(path, torch.float32, attention=attention)
            for load, path in zip((load_policy, load_scorer), paths, strict=True)
        ]
        models[0].checkpoint_activations()
        models[0].train()  # or they are kept
        with FlopCounterMode(display=False) as flops, sdpa_kernel(SDPBackend.MATH):  # whose products are counted
            found[attention.packing] = computed(*models)
        arithmetic[attention.packing] = flops.get_total_flops()
    assert_equal(found["packed"], found["padded"])
    # 345 of 768 tokens are real, and 22,807 of 73,728 pairs of tokens stand in one row.
    assert 22_807 / 73_728 < arithmetic["packed"] / arithmetic["padded"] < 345 / 768


def test_what_is_said_of_rows(tmp_path):
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 1, 1]])
    tokens = torch.arange(20).view(4, 5)
    rows = PackedRows(mask)
    assert rows.packed(tokens).tolist() == [[2, 3, 4, 5, 6, 7, 8, 16, 18, 19]]
    assert rows.padded(rows.packed(tokens)).equal(tokens * mask)
    told = rows.arguments(BY_ROW)
    assert told.pop("row_starts").tolist() == [0, 3, 7, 10] and told == {"row_lengths": [3, 4, 3]}
    told = rows.arguments("flash_attention_2")
    assert told.pop("cu_seq_lens_q").tolist() == told.pop("cu_seq_lens_k").tolist() == [0, 3, 7, 10]
    assert told == {"max_length_q": 4, "max_length_k": 4}
    before = [[0, 0, 1, 1, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 1, 0]]
    assert rows.predicting(3).tolist() == before


def test_transformers_own_support_of_rows_without_padding_is_told_what_it_needs(tmp_path, monkeypatch):
    flash = FakeFlash(monkeypatch)
    paths = long_model(tmp_path / "sft", "qwen2"), long_model(tmp_path / "rm", "opt", scorer=True)

    def loaded():
        return load_policy(paths[0], torch.float32), load_scorer(paths[1], torch.float32)

    expected = computed(*loaded())
    for packs in (False, True):
        models = loaded()
        for one in models:
            one.model.config._attn_implementation = "flash_attention_2"
            one.pack(packs)
        assert_equal(computed(*models), expected)
    assert flash.calls and set(flash.calls) == {(len(LENGTHS), max(LENGTHS))}


def packs(attention: Attention, folder, family: str = "llama") -> bool:
    return load_policy(make_causal_lm(folder, family), torch.float32, attention=attention).packs


def test_on_cpus_only_flash_attention_packs_by_itself(tmp_path):
    assert not any(packs(Attention(name), tmp_path) for name in ("auto", "sdpa", "eager", "flex_attention"))
    assert packs(PACKED, tmp_path)
    model = load_policy(make_causal_lm(tmp_path, "llama"), torch.float32).model
    for name in ("flash_attention_2", "flash_attention_3"):
        model.config._attn_implementation = name
        assert Attention(name).packs_rows_of(model) and not Attention(name, "padded").packs_rows_of(model)


@pytest.fixture
def kernel(monkeypatch):
    """A GPU whose kernel for rows of various lengths is a stand-in, and no more."""
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="torch 2.9 has no such kernel")
    if "window_size" not in (varlen.varlen_attn.__kwdefaults__ or {}):
        pytest.skip("torch 2.10's kernel takes neither scale nor window")
    monkeypatch.setattr(attention_module, "on_gpu", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda enabled: None)
    has_kernel.cache_clear()
    with torch.library._scoped_library("aten", "IMPL") as library:
        yield FakeVarlen(library)
    has_kernel.cache_clear()


# llama: two heads share keys and values; opt: queries are scaled by the model, so that the kernel has to be told 1
@pytest.mark.parametrize("family, settings", [("llama", {}), ("opt", {}), ("mistral", {"sliding_window": 16})])
def test_torchs_kernel_for_rows_gives_what_padded_rows_give(tmp_path, kernel, family, settings):
    paths = long_model(tmp_path / "sft", family, **settings), long_model(tmp_path / "rm", family, True, **settings)
    found = []
    for attention in (PADDED, Attention()):
        models = [
            load(path, torch.float32, attention=attention)
            for load, path in zip((load_policy, load_scorer), paths, strict=True)
        ]
        models[0].checkpoint_activations()
        models[0].train()  # or they are kept
        has_kernel.cache_clear()  # so that the trial is made within a layer whose activations are checkpointed
        kernel.calls.clear()
        found.append(computed(*models))
    assert all(one.packs for one in models) and implementation(models[0]) == BY_ROW
    assert_equal(found[1], found[0])
    # Two layers of a policy whose activations are computed twice, and of a scorer: all rows at once, and no row alone.
    calls = [call for call in kernel.calls if call[0] == len(LENGTHS)]
    assert calls == [(len(LENGTHS), max(LENGTHS), settings.get("sliding_window", 0) - 1)] * 6
    assert attention_in_words(models[0]).startswith("attention: sdpa, rows without padding, all in one kernel")
    with torch.inference_mode():
        sequences, mask, width = ragged(LENGTHS)
        again = models[0](sequences, mask, position_ids(mask), response_length=width, temperature=0.7)[0]
    assert torch.allclose(again * mask[:, -width:], found[0]["logprobs"], atol=1e-5)


def test_the_kernel_needs_the_right_starts(tmp_path, kernel, monkeypatch):
    path = make_causal_lm(tmp_path, "llama")
    asked, module = (load_policy(path, torch.float32, attention=how) for how in (PACKED, Attention()))
    for one in (asked, module):
        check_padding(one, one, "actor model")
        assert one.packs
    right = PackedRows.arguments

    def late(rows, name):
        told = right(rows, name)
        return told | {"row_starts": told["row_starts"] + torch.tensor([0, 1, 0], dtype=torch.int32)}

    monkeypatch.setattr(PackedRows, "arguments", late)
    kernel.checks = False
    with pytest.raises(SharedError, match="rows without padding otherwise than padded ones. Leave --packing packed"):
        check_padding(asked, asked, "actor model")
    check_padding(module, module, "actor model")
    assert not module.packs and attention_in_words(module).startswith("attention: sdpa, padded rows")


def test_dropout_is_computed_row_by_row(tmp_path, kernel):
    module = load_policy(make_causal_lm(tmp_path, "llama"), torch.float32, dropout=0.5, attention=Attention())
    sequences, mask, width = ragged([5, 9, 30])
    kernel.calls.clear()
    module.train()(sequences, mask, position_ids(mask), response_length=width)
    assert not kernel.calls
    module.eval()(sequences, mask, position_ids(mask), response_length=width)
    assert len(kernel.calls) == 2


def test_without_a_kernel_that_works_on_all_ranks_rows_stay_padded(tmp_path, kernel, monkeypatch):
    assert packs(Attention(), tmp_path) and not packs(Attention(packing="padded"), tmp_path)
    assert not packs(Attention("eager"), tmp_path)
    assert not packs(Attention(), tmp_path / "bloom", "bloom")  # takes no position ids
    monkeypatch.setattr(attention_module.distributed, "any_rank", lambda flag: True)  # another rank has none
    assert not packs(Attention(), tmp_path) and packs(PACKED, tmp_path)


@pytest.mark.parametrize("fault", [{"wrong": 1.1}, {"wrong": float("nan")}, {"wrong": "an error"}, {"slope": 0.9}])
def test_a_kernel_that_is_wrong_is_not_taken(kernel, fault):
    vars(kernel).update(fault)
    assert not has_kernel(torch.bfloat16, 4, 2, 8)
    has_kernel.cache_clear()
    vars(kernel).update(wrong=1.0, slope=1.0)
    assert has_kernel(torch.bfloat16, 4, 2, 8)


ENTRIES = {
    "policy": lambda sft, rm, how: load_policy(sft, torch.float32, attention=how),
    "hydra": lambda sft, rm, how: load_hydra(sft, torch.float32, layers=1, attention=how),
    "scorer": lambda sft, rm, how: load_scorer(rm, torch.float32, attention=how),
    "new scorer": lambda sft, rm, how: new_scorer(sft, torch.float32, PAD, 1, attention=how),
    "new critic": lambda sft, rm, how: new_critic(sft, torch.float32, attention=how),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_loading_a_model_on_a_gpu_turns_cudnns_attention_off_unless_it_is_asked_for(tmp_path, monkeypatch, entry):
    paths = make_causal_lm(tmp_path / "sft", "llama"), make_scorer(tmp_path / "reward", "llama")
    said: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", said.append)
    ENTRIES[entry](*paths, Attention())
    assert not said  # on CPUs
    monkeypatch.setattr(attention_module, "on_gpu", lambda: True)
    for name in ("auto", "sdpa", "eager", "cudnn"):
        made = ENTRIES[entry](*paths, Attention(name, "padded"))
        assert implementation(made) == {"auto": "sdpa", "cudnn": "sdpa"}.get(name, name)
    assert said == [False, False, False, True]


def test_cudnns_attention_is_refused_where_it_has_no_effect(tmp_path, monkeypatch):
    path, asked = make_causal_lm(tmp_path, "llama"), Attention("cudnn")
    with pytest.raises(UserError, match="^--attn_implementation cudnn: it has kernels for GPUs alone"):
        asked.check(path, LANGUAGE_MODEL, "bf16", "--actor")
    monkeypatch.setattr(attention_module, "on_gpu", lambda: True)
    monkeypatch.setattr(attention_module, "capability", lambda: (7, 0))
    with pytest.raises(UserError, match="of compute capability 8.0 and newer, and this one has 7.0"):
        asked.check(path, LANGUAGE_MODEL, "fp16", "--actor")
    monkeypatch.setattr(attention_module, "capability", lambda: (9, 0))
    with pytest.raises(UserError, match="computes in fp16 or bf16, and this run in fp32"):
        asked.check(path, LANGUAGE_MODEL, "fp32", "--actor")
    asked.check(path, LANGUAGE_MODEL, "bf16", "--actor")


def test_hydras_and_sliding_windows_pack_too(tmp_path):
    path, reward = make_causal_lm(tmp_path / "sft", "mistral"), make_scorer(tmp_path / "rm", "mistral", offset=0.3)
    sequences, mask, width = ragged([5, 9, 30])
    given = sequences, mask, position_ids(mask)
    counted = mask[:, -width:].bool()

    def said(attention: Attention) -> list[Tensor]:
        hydra = load_hydra(path, torch.float32, layers=1, attention=attention)
        scorer = load_scorer(reward, torch.float32, attention=attention)
        other = load_policy(path, torch.float32, attention=attention)
        for one in (hydra, scorer, other):
            one.model.config.sliding_window = 4
            for part in one.modules():
                if hasattr(part, "sliding_window"):
                    part.sliding_window = 4
        other.direct_head = False  # as of models that change their logits
        assert scorer.packs == hydra.packs == (attention.packing == "packed")
        policies = [one(*given, response_length=width)[0][counted] for one in (hydra, other)]
        policies.append(hydra(*given, response_length=width, role="reference")[0][counted])
        return [*policies, scorer(*given)[mask.bool()]]

    for found, expected in zip(said(PACKED), said(PADDED), strict=True):
        assert torch.allclose(found, expected, atol=1e-5)


def test_all_roles_of_a_trunk_with_adapters_pack(tmp_path):
    path, lora = make_causal_lm(tmp_path, "qwen2"), LoraSpec(dim=4, only=True)
    sequences, mask, width = ragged([5, 9, 30])
    given, counted = (sequences, mask, position_ids(mask)), mask[:, -width:].bool()
    config = make_config("qwen2")
    config.num_labels, found = 1, {}
    for attention in (PADDED, PACKED):
        policy = load_policy(path, torch.float32, merge=False, attention=attention)
        trunk = make_trunk(policy, lora, {"critic": ScoringRole(config=config, lora=lora)})
        trained = {name: weight for name, weight in trunk.named_parameters() if weight.requires_grad}
        for seed, weight in enumerate(trained.values()):
            weight.data.copy_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)))
        by_role = [trunk(*given, response_length=width, role=role)[0][counted] for role in (None, "reference")]
        assert (by_role[0] - by_role[1]).abs().max() > 0.1
        by_role.append(trunk(*given, role="critic")[mask.bool()])
        by_role[2].mean().backward()
        gradients = [weight.grad for name, weight in trained.items() if weight.grad is not None]
        found[trunk.packs] = by_role + gradients
    assert len(found[True]) == len(found[False]) > 20
    for packed, padded in zip(found[True], found[False], strict=True):
        assert torch.allclose(packed, padded, atol=1e-5)


def test_padded_rows_and_single_tokens_are_computed_as_without_it(tmp_path):
    path = make_causal_lm(tmp_path / "sft", "llama")
    sequences, mask, width = ragged([5, 9, 30])
    usual, ours = (load_policy(path, torch.float32, attention=attention) for attention in (PADDED, PACKED))
    ours.pack(False)
    given = sequences, mask, position_ids(mask)
    assert ours(*given, response_length=width)[0].equal(usual(*given, response_length=width)[0])
    assert takes_slot_masks(ours.model)


def blind(module, query, key, value, attention_mask, **how):
    """Attention that looks at padding."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2), None


def test_a_model_that_attends_to_padding_is_refused(tmp_path):
    AttentionInterface.register("sdpa_blind", blind)
    for load, path in (
        (load_policy, make_causal_lm(tmp_path / "sft", "llama")),
        (load_scorer, make_scorer(tmp_path / "rm", "llama")),
    ):
        module = load(path, torch.float32, attention=Attention("eager"))
        check_padding(module, module, "actor model")
        module.model.config._attn_implementation = "sdpa_blind"
        with pytest.raises(SharedError, match="^actor model: with --attn_implementation sdpa_blind .* attends to pad"):
            check_padding(module, module, "actor model")


LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 40}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    "rope, longest, tokens",
    [(LONGROPE, None, 60), (LONGROPE, 41, 60), (LONGROPE, 40, 30), (DYNAMIC, None, 30)],
)
def test_the_longest_row_of_a_run_decides_the_angles_of_all_rows(tmp_path, rope, longest, tokens):
    """tokens: length of the row for which transformers chooses the angles that are expected here. A row of more than 40
    tokens has other angles than a shorter one."""
    config = make_config("llama")
    config.rope_parameters, config.max_position_embeddings = rope, 40 if rope is DYNAMIC else 60
    path = save_random(AutoModelForCausalLM.from_config(config), tmp_path / "model")
    rows = torch.randint(4, VOCABULARY, (2, 60), generator=torch.Generator().manual_seed(3))
    plain = AutoModelForCausalLM.from_pretrained(path)
    expected = plain(rows[:1, :tokens]).logits.log_softmax(-1)[0, :29].gather(1, rows[0, 1:30, None])[:, 0]
    mask = torch.ones_like(rows)
    mask[0, 30:] = 0
    for packing in ("padded", "packed"):
        policy = load_policy(path, torch.float32, attention=Attention("sdpa", packing, longest))
        copy = ActorCopy(SimpleNamespace(module=policy, stage=3, version=0)).module()  # which draws responses
        for module in (policy, copy):
            found = module(rows * mask, mask, position_ids(mask), response_length=59)[0][0, :29]
            assert torch.allclose(found, expected, atol=1e-5)
    save_model(policy, policy.model.state_dict(), make_tokenizer(), tmp_path / "saved")
    assert AutoConfig.from_pretrained(tmp_path / "saved").rope_parameters == plain.config.rope_parameters


def test_angles_that_depend_on_the_rows_beside_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "fixed_rope", lambda config, max_length: {})
    for packing in ("padded", "packed"):
        module = load_policy(
            long_model(tmp_path, "llama", rope_parameters=LONGROPE), torch.float32, attention=Attention("sdpa", packing)
        )
        with pytest.raises(SharedError, match="beside a longer one than alone.* positions depend on the other rows"):
            check_padding(module, module, "actor model")


def test_a_model_that_is_not_told_of_rows_is_refused(tmp_path):
    module = load_policy(make_causal_lm(tmp_path / "sft", "llama"), torch.float32, attention=PACKED)
    module.train()
    check_padding(module, module, "actor model")
    assert module.packs and module.training
    module.packed_inputs = lambda *args: {**type(module).packed_inputs(module, *args), "row_lengths": [13]}
    with pytest.raises(SharedError, match="^actor model: .* rows without padding otherwise .* Leave --packing packed"):
        check_padding(module, module, "actor model")


def split(ranks: int, implementation: str = "auto") -> Attention:
    return Attention(implementation, "packed", ranks=ranks)


@pytest.mark.parametrize(
    ("family", "attention", "message"),
    [
        ("llama", Attention("eager", "packed"), "--packing packed with --attn_implementation eager: .*give sdpa"),
        ("bloom", Attention("auto", "packed"), "--packing packed: --actor .*'bloom', .* give padded"),
        ("bloom", split(2), "--sequence_parallel_size 2: --actor .*'bloom', .* without padding. Leave it out.$"),
        ("llama", split(2, "flex_attention"), "--attn_implementation flex_attention"),
        ("llama", split(2, "eager"), "eager with --sequence_parallel_size 2: ranks split torch's own .* give sdpa"),
        ("llama", split(3), "--sequence_parallel_size 3: .* 4 attention heads, .* Give one of 1, 2, 4"),
    ],
)
def test_rows_without_padding_are_refused_where_they_cannot_be(tmp_path, family, attention, message):
    with pytest.raises(UserError, match=message):
        attention.check(make_causal_lm(tmp_path, family), LANGUAGE_MODEL, "fp32", "--actor")


def test_rows_without_padding_are_refused_where_layers_cut_them_into_chunks(tmp_path):
    path = long_model(tmp_path, "llama", layer_types=["full_attention", "chunked_attention"])
    with pytest.raises(UserError, match="whose attention in transformers takes no rows without padding"):
        PACKED.check(path, LANGUAGE_MODEL, "fp32", "--actor")


@pytest.mark.parametrize("family", ("granitemoehybrid", "lfm2", "qwen3_5_text", "nemotron_h"))
def test_rows_without_padding_are_refused_where_layers_keep_a_state(tmp_path, family):
    """Their state would go on from row to row."""
    family_config(family).save_pretrained(tmp_path)
    for attention, flag in ((PACKED, "packing packed"), (split(2), "sequence_parallel_size 2")):
        with pytest.raises(UserError, match=f"--{flag}: .* whose layers keep a state from token to token"):
            attention.check(str(tmp_path), LANGUAGE_MODEL, "fp32", "--actor")


@pytest.mark.parametrize("served", [False, True])
def test_a_window_of_0_limits_nothing(kernel, monkeypatch, served):
    monkeypatch.setattr(attention_module, "on_gpu", lambda: served)
    given = torch.randn(3, 1, 2, 10, 8, generator=torch.Generator().manual_seed(1)).unbind()
    rows = {"row_lengths": [4, 6], "row_starts": torch.tensor([0, 4, 10], dtype=torch.int32)}
    how = AttentionInterface()[BY_ROW]
    found, expected = (how(torch.nn.Module(), *given, None, **rows, sliding_window=width)[0] for width in (0, None))
    assert found.equal(expected) and found.isfinite().all() and bool(kernel.calls) == served
