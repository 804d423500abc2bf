"""The quickstart's task, from the corpus to PPO: what scripts/quickstart.sh does, with half its PPO steps."""

from pathlib import Path

from scripts.gpu_checks.check import Trial
from scripts.gpu_checks.models import metrics_of, program
from training.tools.toy import model, reviews

LEAST_RISE = 1.0  # of the held-out score, in its standard deviations over the SFT model's responses
STEPS = 30


def learned(trial: Trial) -> None:
    """Steps 1, 2 and 3 in float32, and a held-out score that rises."""
    few = ["--sft=96", "--pairs=96", "--prompts=64", "--eval_prompts=16"] if trial.dry else []
    held_out, rows, steps = (16, 16, 2) if trial.dry else (256, 128, STEPS)
    data, base = trial.folder / "data", trial.folder / "base"
    made = reviews.main(["make", f"--output_dir={data}", *few])
    made += model.main(["--data", f"{data / 'sft.jsonl'}", f"{data / 'pairs.jsonl'}", f"--output_dir={base}"])
    trial.expect(made == 0, "the corpus and the untrained model were not made")
    sft = supervised(trial, 1, base, data / "sft.jsonl", held_out, learning_rate=5e-3, batch=64, epochs=6)
    reward = supervised(trial, 2, sft, data / "pairs.jsonl", held_out, learning_rate=3e-3, batch=32, epochs=2)
    output = trial.folder / "ppo"
    program(
        3,
        actor_model_name_or_path=sft,
        critic_model_name_or_path=reward,
        data_path=data / "prompts.jsonl",
        eval_data_path=data / "eval_prompts.jsonl",
        data_output_path=trial.folder / "cache",
        output_dir=output,
        num_eval_prompts=held_out,
        actor_zero_stage=3,
        critic_zero_stage=3,
        max_prompt_seq_len=12,
        max_answer_seq_len=32,
        per_device_generation_batch_size=rows,
        per_device_training_batch_size=rows,
        max_steps=steps,
        actor_learning_rate=1.5e-3,
        critic_learning_rate=2e-3,
        print_answers_interval=0,
        dtype="fp32",
    )
    lines = metrics_of(trial, output)
    rise = lines[steps]["eval/score"] - lines[0]["eval/score"]
    trial.tell({"score before": round(lines[0]["eval/score"], 2), "rise": round(rise, 2)})
    if trial.needs_gpu("training until the score rises"):
        trial.expect(rise >= LEAST_RISE, f"the held-out score rose by {rise:.2f}, not by {LEAST_RISE}")


def supervised(
    trial: Trial, step: int, start: Path, data: Path, held_out: int, *, learning_rate: float, batch: int, epochs: int
) -> Path:
    """Step 1 or 2 as the quickstart has it; returns the folder."""
    output = trial.folder / ("sft" if step == 1 else "reward")
    flags: dict[str, object] = {"lr_scheduler_type": "cosine", "num_warmup_steps": 20}
    if step == 2:
        flags = {"num_warmup_steps": 10, "normalization_data_path": data.with_name("prompts.jsonl")}
        flags |= {"max_prompt_seq_len": 12, "max_answer_seq_len": 32, "normalization_samples": 2 * held_out}
    program(
        step,
        model_name_or_path=start,
        data_path=data,
        data_output_path=trial.folder / "cache",
        output_dir=output,
        max_seq_len=48,
        per_device_train_batch_size=16 if trial.dry else batch,
        per_device_eval_batch_size=64,
        num_train_epochs=1 if trial.dry else epochs,
        learning_rate=learning_rate,
        held_out=held_out,
        dtype="fp32",
        **flags,
    )
    return output
