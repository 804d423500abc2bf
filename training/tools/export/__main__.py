"""Writes a model of a checkpoint as a Hugging Face folder, one tensor at a time and without engines.

    four-engine-rlhf export out/checkpoints/step_000100 exported
    four-engine-rlhf export out exported_ema --ema               # from the newest checkpoint of the run

    four-engine-rlhf export out exported_adapter --adapter       # the adapter alone, from a LoRA run

from_pretrained can load the folder, which equals bit by bit the model that the run would have saved after that step.
The export needs memory for the largest tensor only, and no GPU.

The checkpoint of a LoRA run does not hold the base, the model with which the run began. To export the merged model, the
base has to be where it was during the run, or in the folder that --base names. If the base's files use other names for
the weights than the model does, as DeepSpeed-Chat's reward models do, the whole base is loaded into memory.
"""

import argparse
import sys
from collections.abc import Sequence

from training.runtime.environment import program


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Run the export that the command line describes; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="four-engine-rlhf export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="a checkpoint, or the output folder of a run")
    parser.add_argument("output", help="a folder that is not there, or empty")
    parser.add_argument("--model", default="actor", choices=("actor", "critic", "model"), help="default: actor")
    parser.add_argument("--ema", action="store_true", help="write the actor's moving average")
    parser.add_argument("--dtype", choices=("fp32", "fp16", "bf16"), help="default: the dtype of the run")
    parser.add_argument("--adapter", action="store_true", help="of a LoRA run, write the adapter alone")
    parser.add_argument("--base", help="the model with which a LoRA run began (default: its path during the run)")
    parser.add_argument("--max_shard_size", default="50GB", help="larger files are split (default: 50GB)")
    given = vars(parser.parse_args(argv))
    from transformers.utils import logging  # these imports take seconds; a mistyped command line is reported first

    from training.tools.export.model_folder import export

    logging.set_verbosity_error()  # a base without a score head is no problem: the checkpoint has it
    logging.disable_progress_bar()
    print(f"written: {export(given.pop('checkpoint'), given.pop('output'), **given)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
