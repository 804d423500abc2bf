"""Estimates the memory that step 3 needs on given machines, from the models' configurations; needs no GPU itself.

    four-engine-rlhf plan --gpu a100-40g --num_gpus 8 --actor_model_name_or_path sft \\
        --critic_model_name_or_path reward --actor_zero_stage 3 --critic_zero_stage 3

Takes step 3's flags. Prints a table, whether the run fits in memory, and if not, what would make it fit. The exit code
is 0 if the run fits, 1 if it does not, and 2 for flags that cannot work.
"""

import sys
from collections.abc import Sequence

from training.runtime.first_look import first_look

if __name__ == "__main__":
    first_look("training.tools.memory.flags:MemoryFlags", __doc__)

from training.config.parsing import parse_flags
from training.runtime.environment import program
from training.tools.memory.flags import MemoryFlags
from training.tools.memory.report import report


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Plan the run that the command line describes; returns the exit code."""
    return report(parse_flags(MemoryFlags, sys.argv[1:] if argv is None else argv, __doc__))


if __name__ == "__main__":
    sys.exit(main())
