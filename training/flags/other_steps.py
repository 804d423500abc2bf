"""What is said of a flag that this step does not have and another one has."""

from training.flags.arguments import ProgramFlags
from training.flags.rlhf_arguments import RLHFFlags
from training.flags.supervised_arguments import RewardFlags, SFTFlags

STEPS = {SFTFlags: 1, RewardFlags: 2, RLHFFlags: 3}

# What serves a flag's purpose in the steps that do not have it.
IN_STEP_3 = {
    "held_out": "here --num_eval_prompts says how many prompts are held out",
    "max_seq_len": "here --max_prompt_seq_len and --max_answer_seq_len say how long a prompt and its answer may be",
    "learning_rate": "here --actor_learning_rate and --critic_learning_rate are given apart",
    "model_name_or_path": "here --actor_model_name_or_path and --critic_model_name_or_path are given apart",
}
IN_STEPS_1_AND_2 = {
    "num_eval_prompts": "here --held_out says how many rows are held out",
    "actor_learning_rate": "here it is --learning_rate",
    "actor_model_name_or_path": "here it is --model_name_or_path",
}


def step_of(arguments_class: type[ProgramFlags]) -> int | None:
    """The step whose flags these are; None of another program's."""
    return next((step for known, step in STEPS.items() if issubclass(arguments_class, known)), None)


def flag_of_other_steps(arguments_class: type[ProgramFlags], name: str) -> str | None:
    """Of which steps `name` is a flag, and what there is here in its place; None where no other step has it."""
    steps = [str(step) for other, step in STEPS.items() if name in other.__dataclass_fields__]
    if not steps or name in arguments_class.__dataclass_fields__:
        return None
    counterparts = IN_STEP_3 if issubclass(arguments_class, RLHFFlags) else IN_STEPS_1_AND_2
    instead = f"; {counterparts[name]}" if name in counterparts else ""
    return f"It is a flag of step{'s' if len(steps) > 1 else ''} {' and '.join(steps)}{instead}."
