"""Flags of step 3 for every dialect, with all weights or with adapters, for runs in several dtypes; what differs."""

import json
from pathlib import Path

from engine.algorithms import DIALECTS
from engine.zero.config import CONFIG_DIR
from tests.distributed.conftest import ALWAYS_PARTITIONED, STEADY_FP16
from tests.tiny_adapters import make_adapter
from tests.tiny_models import make_causal_lm, make_scorer

WAYS = ("all weights", "two trunks", "one trunk")  # the last two with adapters alone
EPOCHS = 2
SMOOTH = {"eps": 1e-2, "clip_range": 5.0, "value_clip_range": 5.0}
"""What makes updates follow gradients without jumps, so that rounding stays as small as it begins. With Adam's 1e-8 the
first updates move every weight by the learning rate, by the sign of gradients that are nothing but rounding too; and
where rounding takes a token over the edge of what is clipped, its whole gradient is gone."""
SETTINGS = {
    "trlx": ["mini_batches=2"],
    "openai": ["truncate_token=eos"],  # "." is no word here
    "grpo": ["samples_per_prompt=4"],
    "reinforce_pp": ["mini_batches=2"],
    "dapo": ["clip_range_high=6", "dynamic_sampling=1"],  # as SMOOTH has the other
    "gspo": ["clip_range_high=6"],
}
COMPARED = {
    "policy/loss": 0.1,
    "value/loss": 0.1,
    "policy/grad_norm": 0.1,
    "value/grad_norm": 0.1,
    "objective/kl": 0.3125,
}
"""Metrics that dtypes are compared by, and what a smaller one is taken for, where a difference is divided by it. A KL
is a mean of differences that almost cancel, so that its error is that of log-probs: half the distance of fp16's numbers
from 4 to 8, 2**-9 nats, for each of a response's 8 tokens is 5 % of this."""


def make_models(folder: Path) -> None:
    """`actor`, `reward`, `judge_adapter` (a reward model on the actor), and for tiny parameters stage3.json, whose fp16
    loss scale is 2**8, and shipped.json, whose is the one that is shipped."""
    make_causal_lm(folder / "actor", "llama", seed=0)
    make_scorer(folder / "reward", "llama", seed=1, offset=-0.3)
    make_adapter(folder / "judge", str(folder / "actor"), dim=2, scorer=True)
    shipped = json.loads((CONFIG_DIR / "zero3.json").read_text())
    tiny = shipped | {"zero_optimization": shipped["zero_optimization"] | ALWAYS_PARTITIONED}
    (folder / "shipped.json").write_text(json.dumps(tiny))
    (folder / "stage3.json").write_text(json.dumps(tiny | {"fp16": STEADY_FP16}))


def words_of(dialect: str, way: str, folder: str) -> list[str]:
    """Step 3's flags, with rates that move something, every engine at stage 3."""
    has_critic = DIALECTS[dialect].has_critic
    judge = "critic" if DIALECTS[dialect].critic_start == "reward_model" else "reward"
    roles = ["actor"] + ["critic"] * (has_critic and way != "one trunk")
    words = f"""--data_path none --output_dir none --dialect {dialect} --actor_model_name_or_path {folder}/actor
        --per_device_training_batch_size 2""".split()
    settings = [f"ppo_epochs={EPOCHS}", "warmup_steps=0", *SETTINGS.get(dialect, [])]
    settings += [f"{name}={value}" for name, value in SMOOTH.items() if has_critic or name != "value_clip_range"]
    if way == "all weights":
        words += ["--actor_learning_rate", "1e-3", f"--{judge}_model_name_or_path", f"{folder}/reward"]
        words += ["--critic_learning_rate", "1e-3"] * has_critic
        settings += ["hydra_layers=1"] * (dialect == "trlx")  # of the model's two
        roles += ["reward"] + ["reference"] * (dialect != "trlx")
    else:
        words += ["--only_optimize_lora", f"--{judge}_model_name_or_path", f"{folder}/judge_adapter"]
        words += ["--actor_lora_dim", "4", "--actor_lora_learning_rate", "1e-2"]
        words += ["--critic_lora_dim", "2", "--critic_lora_learning_rate", "1e-2"] * has_critic
        words += ["--share_trunk"] * (way == "one trunk")
        settings += ["hydra_layers=0"] * (dialect == "trlx")
    for role in roles:
        words += [f"--{role}_zero_stage", "3"] * (role in ("actor", "critic"))
        words += [f"--{role}_ds_config", f"{folder}/stage3.json"]
    return [*words, "--set", *settings]


def differences(exact: list[dict[str, float]], rounded: list[dict[str, float]]) -> dict[str, float]:
    """By metric, how much it differs at most in any step, relative to the larger of it and COMPARED's number; infinite
    where one of them has it and the other has not."""
    found = {}
    for old, new in zip(exact, rounded, strict=True):
        for name, least in COMPARED.items():
            if name in old or name in new:
                gap = abs(new.get(name, float("inf")) - old.get(name, 0.0)) / max(abs(old.get(name, 0.0)), least)
                found[name] = max(found.get(name, 0.0), gap)
    return found


def skipped(steps: list[dict[str, float]], updates: int) -> dict[str, int]:
    """By model, in how many optimizer steps its gradient overflowed; updates: optimizer steps of each step."""
    return {
        name: round(sum(step.get(f"{name}/skipped", 0.0) for step in steps) * updates) for name in ("policy", "value")
    }
