"""Step 3 that writes down what its engines hold before the first step that it trains, and what each step drew: run by
trials that change its layout.

    OUTPUT_DIR.recorded/state/MODEL/rank_00000.safetensors    each rank's runs, as in a restart point
    OUTPUT_DIR.recorded/modules/MODEL.safetensors             the module's full weights, gathered by ZeRO
    OUTPUT_DIR.recorded/responses.RANK.jsonl                  (step, prompt, sample, tokens) of each response
"""

import json
from pathlib import Path

from safetensors.torch import save_file

from engine import distributed
from engine.rlhf_engine import RLHFEngine
from engine.zero.gathering import full_state
from training import step3_rlhf
from training.ppo_trainer import StepReport
from training.restarts.layout import rank_file
from training.restarts.shard_files import write_shards


def recorded() -> None:
    """Have the program write these things down."""
    train = step3_rlhf.train

    def train_and_record(args, plan, trainer, session) -> None:
        folder = Path(f"{args.output_dir}.recorded")
        write_state(folder, trainer.models)
        step = trainer.step

        def step_and_note(prompts) -> StepReport:
            report = step(prompts)
            note_responses(folder / f"responses.{distributed.rank()}.jsonl", report)
            return report

        trainer.step = step_and_note
        train(args, plan, trainer, session)

    step3_rlhf.train = train_and_record


def write_state(folder: Path, models: RLHFEngine) -> None:
    """All ranks call this."""
    (folder / "modules").mkdir(parents=True, exist_ok=True)
    for name, model in models.trained.items():
        write_shards(folder / "state" / name / rank_file(distributed.rank()), model.shards())
        weights = full_state(model.module.model)
        if weights:
            save_file(weights, folder / "modules" / f"{name}.safetensors")
    if models.ema is not None:
        write_shards(folder / "state" / "ema" / rank_file(distributed.rank()), models.ema.shards())


def note_responses(path: Path, report: StepReport) -> None:
    """Add a step's lines."""
    rollout = report.batch.rollout
    with path.open("a") as file:
        for row in range(len(rollout)):
            tokens = rollout.responses[row][rollout.response_mask[row]].tolist()
            line = [report.step, int(rollout.indices[row]), int(rollout.samples[row]), tokens]
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    recorded()
    step3_rlhf.program()
