"""Run by ranks: what the merge program measures at each scale, and the responses that it measured."""

import dataclasses
import json
from pathlib import Path

from engine.models.reading import read_tokenizer
from engine.zero.config import EngineConfig
from training.tools.measuring import read_held_out
from training.tools.merge.flags import MergeFlags
from training.tools.merge.frontier import Frontier
from training.tools.merge.weights import MergedWeights, stored_weights


def reward(prompts: list[str], responses: list[str]) -> list[float]:
    """How many words a response has."""
    return [float(len(response.split())) for response in responses]


def measured(folder: str, output: str, trained: list[str], scales: list[float], stage: int) -> dict:
    """The points of these scales with a stage of the policy's, the rows, and what the evaluator's passes gave."""
    args = MergeFlags(
        sft_model_name_or_path=f"{folder}/actor",
        trained_model_name_or_path=[f"{folder}/{name}" for name in trained],
        data_path=[f"{output}/prompts.jsonl"],
        eval_data_path=[f"{output}/held_out.jsonl"],
        reward_model_name_or_path=f"{folder}/reward",
        reward_function=f"{__file__}:reward",
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
    spec = args.engine_spec()
    configs = {
        role: EngineConfig(role, stage, path=f"{folder}/stage{stage}.json") for role in ("actor", "reference", "reward")
    }
    spec = dataclasses.replace(spec, **configs)
    args.engine_spec = lambda: spec
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
