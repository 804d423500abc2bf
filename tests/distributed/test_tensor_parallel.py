"""A model divided among two ranks draws the tokens that the whole one draws, and says the same of given ones."""

from pathlib import Path

import pytest
import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    MixtralForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
    OPTForSequenceClassification,
)

from engine.rollout.base import SamplingConfig
from scripts.harness.models import EOS, PAD, make_causal_lm, make_config, make_scorer, save_random
from scripts.harness.ranks import run_ranks

RANKS, LAYERS = 2, 20
SAMPLING = SamplingConfig(
    max_new_tokens=12, pad_token_id=PAD, stop_token_ids=(EOS, 7, 11), seed=5, logprob_temperature=1.0
)
FAMILIES = ("llama", "qwen2", "gpt_neox", "opt", "narrow opt", "mixtral")
TIED = ("qwen2", "opt")


def experts(folder: Path, kind, seed: int) -> str:
    """A mixture of four experts in each layer, two of which read a token."""
    settings = make_config("mistral").to_dict() | {"num_local_experts": 4, "num_labels": 1, "sliding_window": None}
    known = {name: value for name, value in settings.items() if name != "model_type"}
    return save_random(kind(MixtralConfig(**known)), folder, seed=seed)


def narrow(folder: Path, kind, seed: int) -> str:
    """An OPT as that of 350M is: word vectors of half the width, norms behind the sums."""
    settings = make_config("opt", tied=True).to_dict() | {"word_embed_proj_dim": 16, "do_layer_norm_before": False}
    known = {name: value for name, value in settings.items() if name != "model_type"} | {"num_labels": 1}
    return save_random(kind(OPTConfig(**known)), folder, seed=seed)


MADE = {
    "mixtral": (experts, MixtralForCausalLM, MixtralForSequenceClassification),
    "narrow opt": (narrow, OPTForCausalLM, OPTForSequenceClassification),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory, folder) -> dict[str, list[dict]]:
    """What each function of work_tensor_parallel returned on both ranks, by its name."""
    models = tmp_path_factory.mktemp("families")
    folders = {}
    for name in FAMILIES:
        policy, scorer = models / name / "policy", models / name / "scorer"
        if name in MADE:
            make, *kinds = MADE[name]
            for seed, (place, kind) in enumerate(zip((policy, scorer), kinds, strict=True)):
                make(place, kind, seed)
        else:
            make_causal_lm(policy, name, tied=name in TIED)
            make_scorer(scorer, name, offset=-0.3)
        folders[name] = str(policy), str(scorer)
    make_causal_lm(Path(folder) / "deep", "llama", layers=LAYERS)
    ranks = run_ranks(
        "tests.distributed.work_tensor_parallel:everything",
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
        for name in ("sampled logprobs", "logprobs", "scores"):
            ours, whole = rank[family][name]
            assert ours.shape == whole.shape and torch.allclose(ours, whole, atol=2e-5), name
    shapes = [rank[family]["scores"][1].shape for rank in found["families"]]
    assert shapes[0] != shapes[1]


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


def test_all_models_make_experience_so(found):
    for rank in found["partitions"]:
        for name, (together, own) in rank["experience"].items():
            assert together.shape == own.shape and torch.allclose(together, own, atol=5e-5), name


def test_a_copy_for_which_a_rank_has_no_memory_is_done_without(found):
    for number, rank in enumerate(found["partitions"]):
        expected, *answers = rank["no memory"]["answers"]
        assert answers == [expected] * 2 and rank["no memory"]["copies"] is None
        told = (
            "a copy of the actor does not fit (CUDA out of memory on rank 1, when it was made): it computes through "
            "its partitions from now on"
        )
        assert rank["no memory"]["told"] == ([told] if number == 0 else [])
