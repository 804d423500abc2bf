"""The command `four-engine-rlhf`, which an installation has: it runs the program that its first word names.

    four-engine-rlhf ppo --actor_model_name_or_path out/sft ...      # as python -m training.step3_rlhf ...

A program's imports may take seconds; this module imports none of them.
"""

import runpy
import sys

from engine.errors import nearest_names

NAME = "four-engine-rlhf"
COMMANDS = {
    "sft": ("training.step1_sft", "step 1: supervised fine-tuning"),
    "reward": ("training.step2_reward", "step 2: a reward model from pairs"),
    "ppo": ("training.step3_rlhf", "step 3: PPO"),
    "plan": ("training.tools.memory", "the memory that step 3 needs on given GPUs"),
    "compare": ("training.tools.compare", "which of several models is better"),
    "audit": ("training.tools.audit", "what the best responses by a reward look like, before PPO"),
    "merge": ("training.tools.merge", "models between the SFT model and trained ones"),
    "serve": ("training.tools.serve", "models answer over HTTP, and a reward model scores"),
    "report": ("training.tools.report", "one run, or several, as an HTML page"),
    "export": ("training.tools.export", "a checkpoint as a model"),
}
"""{command: (its module, what it does)}."""
_LISTED = "\n".join(f"{name:<9}{module:<24}{what}" for name, (module, what) in COMMANDS.items())
HELP = f"""usage: {NAME} COMMAND [flags]          {NAME} COMMAND --help lists the flags

command  module
{_LISTED}

A command runs as one process, on one GPU. For several GPUs, start the module, with the same flags:

deepspeed --num_gpus 8 --module training.step3_rlhf [flags]

sft, reward, ppo, compare, audit and merge can use several."""


def running_command() -> str | None:
    """The command that is this process's program, as "four-engine-rlhf ppo"; None if it is no module of COMMANDS."""
    module = getattr(sys.modules["__main__"].__spec__, "name", "").removesuffix(".__main__")
    return next((f"{NAME} {name}" for name, (program, _) in COMMANDS.items() if program == module), None)


def main() -> int:
    """Run the program that this process's command line names; returns the exit code if there is none."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(HELP)
        return 0
    if name not in COMMANDS:
        near = " or ".join(nearest_names(name, COMMANDS))
        instead = f"Did you mean {near}?" if near else f"{NAME} --help lists the commands."
        print(f"error: unknown command {name}. {instead}", file=sys.stderr)
        return 2
    runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
