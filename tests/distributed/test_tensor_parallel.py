"""An actor divided among two ranks draws the tokens that the whole one draws."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, OPTConfig, OPTForCausalLM

from engine import distributed
from engine.actor_copy import ActorCopy
from engine.models.loading import load_policy
from engine.models.tensor_parallel import bare_model
from engine.rlhf_engine import RLHFEngine
from engine.rollout import ReplicaRollouts
from engine.rollout.base import SamplingConfig
from engine.zero.gathering import full_numel, whole_weights
from scripts.harness.models import EOS, PAD, make_causal_lm, make_config, make_tokenizer, save_random
from scripts.harness.ranks import run_ranks
from tests.distributed.tiny_run import engine_spec, prompt_batch
from tests.distributed.work_rollouts import _by_key
from training.tools.memory.passes import LiveBytes


def engine(module, stage: int) -> SimpleNamespace:
    """What copies ask of an engine; its weights stand whole, which gathering leaves as they are."""
    return SimpleNamespace(module=module.requires_grad_(False).eval(), stage=stage, version=0)


def everything(
    folders: dict[str, str], folder: str, config: str, ranks: int, sampling: SamplingConfig
) -> dict[str, dict]:
    """What both functions below return, by their names."""
    return {
        "families": families(folders, ranks, sampling),
        "partitions": partitions(folder, config, ranks, sampling),
    }


def partitions(folder: str, config: str, ranks: int, sampling: SamplingConfig) -> dict:
    """A deep actor at stage 3 and its tensor-parallel copy: what both answer before and after an optimizer step, and
    the most bytes that the copy has taken while it was made and filled, or filled; and those of a walk through all
    weights at once."""
    models = RLHFEngine.from_pretrained(engine_spec(folder, 3, config=config, actor="deep"))
    actor = models.actor
    copy = ActorCopy(actor, ranks)
    backends = ReplicaRollouts(actor, make_tokenizer(), copy=copy), ReplicaRollouts(actor, make_tokenizer())
    bare = bare_model(actor.module)  # on the meta device, where bytes are none
    prompts, answers, peaks = prompt_batch([distributed.rank(), 5 + distributed.rank()]), [], []
    for step in range(2):
        if step:
            rollout = backends[1].generate(prompts, sampling)
            inputs = rollout.sequences, rollout.attention_mask, rollout.position_ids
            logprobs, _ = actor(*inputs, response_length=rollout.response_length)
            actor.backward(-(logprobs * rollout.response_mask).sum() / 100, last=True)
            actor.step(0.05)
        with (
            mock.patch("engine.actor_copy.bare_model", lambda module: bare),
            mock.patch("engine.zero.gathering.GATHER_BUCKET", 1),
            LiveBytes() as live,
        ):
            copy.module()
        peaks.append(live.peak)
        answers.append([dict(_by_key(backend.generate(prompts, sampling))) for backend in backends])
    with LiveBytes() as live:
        for _, weight in whole_weights(actor.module):  # of one bucket
            del weight
    peaks.append(live.peak)
    return {"answers": answers, "peaks": peaks, "whole": 4 * sum(map(full_numel, actor.module.parameters()))}


def families(folders: dict[str, str], ranks: int, sampling: SamplingConfig) -> dict[str, dict]:
    """{family: folder} -> {family: what the group of `ranks` computes, and what each rank does alone}."""
    indices = list(range(2 * distributed.world_size() + 1))[distributed.rank_share(2 * distributed.world_size() + 1)]
    return {name: _family(path, ranks, sampling, indices) for name, path in folders.items()}


@torch.no_grad()
def _family(policy: str, ranks: int, sampling: SamplingConfig, indices: list[int]) -> dict:
    model = load_policy(policy, torch.float32)
    actor, alone = engine(model, 3), ReplicaRollouts(engine(model, 0), make_tokenizer())
    together = ActorCopy(actor, ranks)
    rollouts = ReplicaRollouts(actor, make_tokenizer(), 2, together)
    prompts = prompt_batch(indices).repeat(2)
    rollout, expected = rollouts.generate(prompts, sampling), alone.generate(prompts, sampling)
    numbers = [sum(p.numel() for p in module.model.parameters()) for module in (together.module(), model)]
    return {
        "answers": [dict(_by_key(each)) for each in (rollout, expected)],
        "sampled logprobs": [each.logprobs for each in (rollout, expected)],
        "numbers": numbers,
    }


RANKS, LAYERS = 2, 20
SAMPLING = SamplingConfig(
    max_new_tokens=12, pad_token_id=PAD, stop_token_ids=(EOS, 7, 11), seed=5, logprob_temperature=1.0
)
FAMILIES = ("llama", "qwen2", "gpt_neox", "opt", "narrow opt", "mixtral")
TIED = ("qwen2", "opt")


def experts(folder: Path) -> str:
    """A mixture of four experts in each layer, two of which read a token."""
    settings = make_config("mistral").to_dict() | {"num_local_experts": 4, "sliding_window": None}
    known = {name: value for name, value in settings.items() if name != "model_type"}
    return save_random(MixtralForCausalLM(MixtralConfig(**known)), folder)


def narrow(folder: Path) -> str:
    """An OPT as that of 350M is: word vectors of half the width, norms behind the sums."""
    settings = make_config("opt", tied=True).to_dict() | {"word_embed_proj_dim": 16, "do_layer_norm_before": False}
    known = {name: value for name, value in settings.items() if name != "model_type"}
    return save_random(OPTForCausalLM(OPTConfig(**known)), folder)


MADE = {"mixtral": experts, "narrow opt": narrow}


@pytest.fixture(scope="module")
def found(tmp_path_factory, folder) -> dict[str, list[dict]]:
    """What each function for the ranks returned on both, by its name."""
    models = tmp_path_factory.mktemp("families")
    folders = {}
    for name in FAMILIES:
        if name in MADE:
            MADE[name](models / name)
        else:
            make_causal_lm(models / name, name, tied=name in TIED)
        folders[name] = str(models / name)
    make_causal_lm(Path(folder) / "deep", "llama", layers=LAYERS)
    ranks = run_ranks(
        "tests.distributed.test_tensor_parallel:everything",
        world=RANKS,
        folders=folders,
        folder=folder,
        config="stage3.json",
        ranks=RANKS,
        sampling=SAMPLING,
    )
    return {name: [rank[name] for rank in ranks] for name in ("families", "partitions")}


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_with_halves_are_one_model(found, family):
    """Each with rows of its own, of lengths of their own."""
    for rank in found["families"]:
        together, alone = rank[family]["answers"]
        assert together == alone and len(together) >= 4
        ours, whole = rank[family]["sampled logprobs"]
        assert ours.shape == whole.shape and torch.allclose(ours, whole, atol=2e-5)


def test_a_rank_holds_half_of_the_weights_and_a_bucket(found):
    """By hand: all but two vectors a layer and the last norm's are divided, tables of positions too."""
    width, tokens, positions = 32, 64, 64 + 2
    llama = 2 * tokens * width + 2 * (3 * width * 48 + 2 * width * width + 2 * width * width // 2)
    vectors = width * (2 * 2 + 1)
    opt = (tokens + positions) * width + 2 * (2 * width * 48 + 4 * width * width + 3 * width + 48)
    kept = 2 * (2 * width + 4 * width) + 2 * width  # with biases after sums, and norms' two each
    for rank in found["families"]:
        assert rank["llama"]["numbers"] == [llama // 2 + vectors, llama + vectors]
        assert rank["opt"]["numbers"] == [opt // 2 + kept, opt + kept]
        # Word vectors and their way in and out; no norm at the end.
        change = 2 * 16 * width - 16 * tokens
        narrow = [opt // 2 + change // 2 + kept - 2 * width, opt + change + kept - 2 * width]
        assert rank["narrow opt"]["numbers"] == narrow
    for rank in found["partitions"]:
        made, refilled, walked = rank["peaks"]
        assert rank["whole"] / 2 < made <= 0.55 * rank["whole"]
        assert refilled < 0.05 * rank["whole"]  # new weights take the old ones' place
        assert (
            walked <= 1.5 * rank["whole"]
        )  # half of it is sent, all of it arrives, and then one weight is made of that


def test_partitions_fill_it_before_and_after_an_optimizer_step(found):
    for rank in found["partitions"]:
        before, after = rank["answers"]
        assert before[0] == before[1] and after[0] == after[1] and before[0] != after[0]
