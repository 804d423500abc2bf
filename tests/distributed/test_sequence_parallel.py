"""Rows that the ranks of a group split: in every family that packs, results and gradients are those of transformers
alone; whole runs of a trainer are those without groups."""

from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from engine import distributed
from engine.distributed import RankGroup
from engine.experience import Rollout
from engine.models.attention import Attention
from engine.models.config_and_tokenizer import LANGUAGE_MODEL
from engine.models.loading import load_policy, load_scorer
from engine.models.lora import LoraSpec
from scripts.harness.models import PAD, VOCABULARY, family_config, make_adapter, save_random
from scripts.harness.programs import Tiny, lasting_metrics
from scripts.harness.ranks import run_ranks
from tests.distributed import plain
from tests.distributed.test_supervised import run as run_program
from tests.distributed.test_unsup import Texts
from tests.distributed.tiny_run import DIALECT, TinyPrompts, build_trainer, engine_spec, of_each
from tests.engine.fake_models import rollout_of
from tests.engine.zero.inspecting import weights
from tests.training.tools.memory.configurations import llama
from tests.training.tools.memory.test_passes import measured_pass
from training.tools.memory.meta_model import built
from training.tools.memory.passes import training_pass

FAMILIES = {
    "llama": ("llama", {}),
    "one_key_head": ("llama", {"num_key_value_heads": 1}),
    "window": ("mistral", {}),
    "qwen3": ("qwen3", {}),
    "opt": ("opt", {}),
    "soft_caps": ("gemma3_text", {"final_logit_softcapping": 3.0}),
    "experts": ("mixtral", {}),
    "two_widths": ("deepseek_v3", {}),
}
PROMPTS, RESPONSES = (9, 1, 3, 2, 7), (12, 3, 1, 4, 2)
OWN = {"two": [[0, 4], [1, 2, 3], [], []], "four": [[2], [], [], []], "long": [[], [0, 1, 2, 3, 4], [], []]}
"""{name: the rows that each of four ranks brings}; in "two" a group has none, in "four" are as many tokens as ranks."""


def rows(chosen: list[int]) -> Rollout:
    """Some of five rows of 4 to 21 tokens."""
    draw = Random(5).choices
    texts = [[draw(range(4, VOCABULARY), k=length) for length in lengths] for lengths in (PROMPTS, RESPONSES)]
    return rollout_of(*texts, PAD).select(torch.tensor(chosen, dtype=torch.int64), None)


def in_groups(folders: dict[str, str]) -> dict:
    """{(family, rows): what this rank finds of its rows, and the gradients of all ranks}, in groups of two ranks for
    the rows "two", else of four."""
    two, four = RankGroup(2), RankGroup(4)
    found = {}
    for family, folder in folders.items():
        packed = Attention(packing="packed")
        modules = (
            load_policy(f"{folder}/sft", torch.float32, attention=packed),
            load_scorer(f"{folder}/reward", torch.float32, attention=packed),
        )
        modules[0](torch.arange(8).unsqueeze(0), probe=True)
        for name, own in OWN.items():
            part = rows(own[distributed.rank()])
            given = part.sequences, part.attention_mask, part.position_ids
            for module in modules:
                module.split(two if name == "two" else four)
                module.zero_grad()
                module.checkpoint_activations()
                module.train()
            logprobs, entropies = modules[0](*given, response_length=part.response_length, with_entropy=True)
            values = modules[1](*given)[:, part.prompt_length - 1 : -1]
            loss = ((logprobs + entropies + values**2) * part.response_mask).sum()
            loss.backward()
            found[family, name] = {
                "outputs": [(output.detach() * part.response_mask) for output in (logprobs, entropies, values)],
                "gradients": [_summed(module.model) for module in modules],
            }
    return found


def _summed(model) -> dict[str, torch.Tensor]:
    """The gradients of all ranks, added up; an expert may have none on some."""
    named = model.named_parameters()
    return {
        key: distributed.all_reduce_sum(torch.zeros_like(one) if one.grad is None else one.grad) for key, one in named
    }


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> dict[str, str]:
    """{family: a folder with sft and reward}."""
    folder = tmp_path_factory.mktemp("families")
    for name, (family, changes) in FAMILIES.items():
        config = family_config(family, **changes)
        for kind, part in ((AutoModelForCausalLM, "sft"), (AutoModelForSequenceClassification, "reward")):
            config.num_labels = 1
            save_random(kind.from_config(config, dtype=torch.float32), folder / name / part)
    return {name: str(folder / name) for name in FAMILIES}


@pytest.fixture(scope="module")
def four_ranks(families) -> list[dict]:
    return run_ranks("tests.distributed.test_sequence_parallel:in_groups", world=4, folders=families)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_slice_of_each_rank_gives_what_transformers_gives_alone(families, four_ranks, family, name):
    dtype = torch.float32 if family in ("experts", "two_widths") else torch.float64  # experts know no float64
    kinds = {"sft": AutoModelForCausalLM, "reward": AutoModelForSequenceClassification}
    policy, scorer = (
        kind.from_pretrained(f"{families[family]}/{part}", dtype=dtype).eval() for part, kind in kinds.items()
    )
    loss = torch.zeros((), dtype=torch.float64)
    for rank, own in zip(four_ranks, OWN[name]):
        for output, row in zip(zip(*rank[family, name]["outputs"]), own):
            one = rows([row])
            hidden = scorer.base_model(**plain._inputs(one)).last_hidden_state
            values = scorer.score(hidden)[:, one.prompt_length - 1 : -1, 0].double()
            expected = plain.logprobs(policy, one, 1.0), plain.entropies(policy, one, 1.0), values
            loss = loss + sum((each * one.response_mask).sum() for each in (*expected[:2], values**2))
            for got, wanted in zip(output, expected):
                wanted = (wanted * one.response_mask)[0]
                torch.testing.assert_close(got[: len(wanted)].double(), wanted.detach(), rtol=1e-5, atol=2e-5)
    loss.backward()
    for number, model in enumerate((policy, scorer)):
        wanted = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
        for rank in four_ranks:
            got = rank[family, name]["gradients"][number]
            assert plain.relative_error({key: got[key] for key in wanted}, wanted) < (
                1e-5 if dtype == torch.float64 else 3e-5
            )


ROLES_OF_TRAINED = {"reference": None, "reward": None}  # the actor's and the critic's engine compute them
RUNS = {
    "stage 1, texts, average": {"stage": 1, "texts": True, "ema_decay": 0.5},
    "stage 2, checkpointing, hydra": {"stage": 2, "hydra_layers": 1, "critic_gradient_checkpointing": True},
    "stage 3, adapters": {
        "stage": 3,
        **ROLES_OF_TRAINED,
        "actor_lora": LoraSpec(dim=4, lr=1e-3, only=True),
        "critic_lora": LoraSpec(dim=4, lr=1e-3, only=True),
        "actor_gradient_checkpointing": True,
    },
    "stage 3, one trunk": {
        "stage": 3,
        "total_steps": 1,  # later steps amplify rounding, and other micro-batches do the same
        **ROLES_OF_TRAINED,
        "actor": "start_adapter",
        "critic_path": "judge_adapter",
        "share_trunk": True,
        "actor_lora": LoraSpec(dim=4, lr=1e-3, only=True),
        "critic_lora": LoraSpec(dim=2, lr=1e-3, only=True),
    },
}


def some_steps(
    folder: str, blocks: torch.Tensor, stage: int, texts: bool = False, total_steps: int = 3, **spec
) -> dict[str, dict]:
    """{"plain" or "split": the weights of actor and critic after these steps, and the metrics of the last one}."""
    found = {}
    if "critic_path" in spec:
        spec["critic_path"] = str(Path(folder) / spec["critic_path"])
    for name, ranks in {"plain": 1, "split": 2}.items():
        attention = Attention(packing="packed", ranks=ranks)
        trainer = build_trainer(
            engine_spec(folder, stage, config=f"stage{stage}.json", attention=attention, **spec),
            dialect=DIALECT.replaced(mini_batches=2, entropy_coef=0.1, value_clip_range=None),
            micro_batch_size=1,
            unsupervised=Texts(blocks) if texts else None,
            padded=False,
            total_steps=total_steps,
        )
        reports = list(trainer.fit(TinyPrompts(8)))
        found[name] = {role: weights(model) for role, model in trainer.models.trained.items()}
        if trainer.models.ema is not None:
            with trainer.models.ema.swapped():
                found[name]["average"] = weights(trainer.models.actor)
        found[name]["metrics"] = reports[-1].metrics
        trainer.models.destroy()
    return found


@pytest.fixture(scope="module")
def runs(folder, output) -> list[dict]:
    make_adapter(f"{folder}/start", f"{folder}/actor")
    make_adapter(f"{folder}/judge", f"{folder}/actor", scorer=True, dim=2)
    blocks = torch.randint(4, VOCABULARY, (6, 14), generator=torch.Generator().manual_seed(3))
    return of_each("tests.distributed.test_sequence_parallel:some_steps", RUNS, folder=folder, blocks=blocks)


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_the_one_without_groups(runs, run):
    for rank in runs:
        plain_run, split_run = rank[run]["plain"], rank[run]["split"]
        for role in plain_run.keys() - {"metrics"}:
            assert plain.relative_error(split_run[role], plain_run[role]) < 1e-5
        for name in ("policy/loss", "value/loss", "policy/ratio_max", "objective/kl", "objective/scores"):
            assert split_run["metrics"][name] == pytest.approx(plain_run["metrics"][name], rel=1e-4, abs=1e-6), name


def programs(folder: str, tiny: Tiny) -> list[bool]:
    """Which runs of steps 1 to 3 ended; they write into `folder`/STEP_RANKS."""
    rules = tiny.folder / "rules.py"
    if distributed.is_main():
        rules.write_text("def words(prompts, texts):\n assert texts\n return [float(len(set(t))) for t in texts]\n")
    distributed.barrier()
    changes = {
        1: {"held_out": 5, "eval_interval": 4},
        2: {"held_out": 5, "eval_interval": 3, "normalize_before": True},
        3: {"per_device_training_batch_size": 1, "eval_steps": 1, "reward_function": f"{rules}:words"},
    }
    ended = []
    for step in (1, 2, 3):
        for ranks in (1, 2):
            flags = tiny.flags(step, packing="packed", sequence_parallel_size=ranks, **changes[step])
            ended.append(run_program(step, flags, Path(folder) / f"{step}_{ranks}"))
    return ended


def test_programs_print_the_same_metrics(tmp_path):
    """Held-out examples are five, dealt to two ranks; a function scores responses, and it is never given none."""
    how = {"folder": str(tmp_path), "tiny": Tiny(tmp_path / "tiny")}
    assert all(run_ranks("tests.distributed.test_sequence_parallel:programs", **how)[0])
    for step in (1, 2, 3):
        whole, split = (lasting_metrics(tmp_path / f"{step}_{ranks}") for ranks in (1, 2))
        for line, other in zip(split, whole, strict=True):
            assert line == pytest.approx(other, rel=1e-3, abs=1e-4)


LONG = 1024  # tokens of a row: much more than the model is wide


def halves(path: str) -> list[int]:
    """The bytes at the peak of a pass over a long row of the first rank, without checkpointing and with it."""
    group = RankGroup(2)
    return [measured_pass(path, LANGUAGE_MODEL, 1 - group.place, LONG, each, group) for each in (False, True)]


def test_activations_are_halved_and_planned(tmp_path):
    ranks = run_ranks("tests.distributed.test_sequence_parallel:halves", path=llama(tmp_path))
    attention = Attention(packing="packed", ranks=2)
    for checkpointing, found in zip((False, True), zip(*ranks)):
        how = {"dtype": "fp32", "trust_remote_code": False, "checkpointing": checkpointing, "attention": attention}
        model = built("actor", str(tmp_path), LANGUAGE_MODEL, True, **how)
        assert training_pass(model, 1, LONG, LONG - 1) == pytest.approx(found[0], rel=0.1)
        assert max(found) < 0.6 * measured_pass(tmp_path, LANGUAGE_MODEL, 1, LONG, checkpointing)
