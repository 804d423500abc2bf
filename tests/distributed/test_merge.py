"""What the merge program measures on two ranks, beside plain models with weights that are merged here."""

import dataclasses
import json
from pathlib import Path
from statistics import fmean

import pytest
import torch

from engine.models.config_and_tokenizer import read_tokenizer
from engine.zero.config import EngineConfig
from scripts.harness.models import make_causal_lm
from scripts.harness.ranks import run_ranks
from tests.distributed import plain
from training.tools.measuring import read_held_out
from training.tools.merge.flags import MergeFlags
from training.tools.merge.frontier import Frontier
from training.tools.merge.weights import MergedWeights, stored_weights


def reward(prompts: list[str], responses: list[str]) -> list[float]:
    """How many words a response has."""
    return [float(len(response.split())) for response in responses]


def judge(prompts: list[str], responses: list[str]) -> list[float]:
    """1 for an even number of words."""
    return [float(len(response.split()) % 2 == 0) for response in responses]


def measured(folder: str, output: str, trained: list[str], scales: list[float], stage: int) -> dict:
    """The points of these scales with a stage of the policy's, the rows, and what the evaluator's passes gave."""
    args = MergeFlags(
        sft_model_name_or_path=f"{folder}/actor",
        trained_model_name_or_path=[f"{folder}/{name}" for name in trained],
        data_path=[f"{output}/prompts.jsonl"],
        eval_data_path=[f"{output}/held_out.jsonl"],
        reward_model_name_or_path=[f"{folder}/reward"],
        reward_function=[f"{__file__}:reward", f"{__file__}:judge"],
        reward_weights=[1.0, 0.0],
        choose_by="eval/reward_judge",
        kl_coef=0.5,
        num_eval_prompts=9,
        max_prompt_seq_len=8,
        max_answer_seq_len=10,
        per_device_eval_batch_size=4,
        temperature=0.8,
        zero_stage=stage,
        dtype="fp32",
        data_output_path=str(Path(output) / "cache"),
        output_dir=output,
    )
    spec = args.spec_of(args.sft_model_name_or_path)
    configs = {
        role: EngineConfig(role, stage, path=f"{folder}/stage{stage}.json") for role in ("actor", "reference", "reward")
    }
    spec = dataclasses.replace(spec, **configs)
    args.spec_of = lambda path: spec
    frontier = Frontier(args, read_held_out(args, read_tokenizer(args.sft_model_name_or_path, "--sft")))
    make, found = frontier.evaluator.experience_maker.make_experience, []

    def noted(rollout):
        found.append(make(rollout))
        return found[-1]

    frontier.evaluator.experience_maker.make_experience = noted
    sft, *others = (stored_weights(path, "--trained") for path in (spec.actor_path, *args.trained_model_name_or_path))
    points, rows = zip(*(frontier.at(MergedWeights(sft, others, scale)) for scale in scales), strict=True)
    return {"points": [dataclasses.asdict(point) for point in points], "rows": rows, "experiences": found}


def write_prompts(folder: str) -> None:
    """Three prompts and nine that are held out, of 30 words together."""
    texts = [" ".join(f"w{4 + (7 * row + word) % 30:02d}" for word in range(2 + row % 5)) for row in range(12)]
    lines = [json.dumps({"prompt": text}) + "\n" for text in texts]
    (Path(folder) / "prompts.jsonl").write_text("".join(lines[:3]))
    (Path(folder) / "held_out.jsonl").write_text("".join(lines[3:]))


SCALES, RUNS, TEMPERATURE = [0.0, 0.5, 1.5], ["run1", "run2"], 0.8


@pytest.fixture(scope="module")
def ranks(folder, output) -> list[dict]:
    """What both ranks found, with models in parts."""
    write_prompts(output)
    for seed, name in enumerate(RUNS, 40):
        make_causal_lm(f"{folder}/{name}", "llama", seed=seed)
    arguments = {"folder": folder, "output": output, "trained": RUNS, "scales": SCALES, "stage": 3}
    return run_ranks("tests.distributed.test_merge:measured", **arguments)


@torch.no_grad()
def model_at(folder: str, scale: float):
    """The SFT model, moved by the mean of what both runs are away from it."""
    model, others = plain.policy(folder), [plain.policy(folder, name).state_dict() for name in RUNS]
    for name, weight in model.named_parameters():
        weight.add_(scale * ((others[0][name] + others[1][name]) / 2 - weight))
    return model


@pytest.mark.parametrize("place, scale", enumerate(SCALES))
def test_kl_is_that_of_the_merged_model_to_the_sft_model(ranks, folder, place, scale):
    sft, merged, kls = plain.policy(folder), model_at(folder, scale), {}
    for rank in ranks:
        rollout = rank["experiences"][place].rollout
        with torch.no_grad():
            own, reference = (plain.logprobs(model, rollout, TEMPERATURE) for model in (merged, sft))
        kl = ((own - reference) * rollout.response_mask).sum(-1)
        kls |= dict(zip(rollout.indices.tolist(), kl.tolist()))
    assert len(kls) == 9  # of ten rows, as two ranks have equally many
    for rank in ranks:
        assert rank["points"][place]["kl"] == pytest.approx(fmean(kls.values()), abs=1e-4)
        assert [row["kl"] for row in rank["rows"][place]] == pytest.approx([kls[key] for key in sorted(kls)], abs=1e-4)
        counts = [len(row["response"].split()) for row in rank["rows"][place]]
        assert rank["points"][place]["rewards"]["reward"] == pytest.approx(fmean(counts))
        judged = fmean(float(count % 2 == 0) for count in counts)
        assert rank["points"][place]["rewards"]["judge"] == pytest.approx(judged)
        assert rank["points"][place]["chosen_by"] == pytest.approx(judged - 0.5 * fmean(kls.values()), abs=1e-4)
        for row in rank["rows"][place]:
            assert row["score"] == pytest.approx(row["reward_model"] + row["reward_reward"], abs=1e-5)
    assert abs(fmean(kls.values())) < 1e-6 if scale == 0.0 else fmean(kls.values()) > 1.0
