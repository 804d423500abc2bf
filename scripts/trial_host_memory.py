"""Host memory over all ranks while a model is loaded and while it is saved, beyond what there was before.

    python scripts/trial_host_memory.py                       # 1 GB, 2 ranks, stages 3 and 0

Bytes are PSS: what several processes have mapped counts once, files that are read by mapping included.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests/, which is not installed


def main() -> int:
    """Measure, print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=11, help="of 67 MB each, beside 262 MB of embeddings (11: 1 GB)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--stages", type=int, nargs="+", default=[3, 0], help="of ZeRO (default: 3 0)")
    parser.add_argument("--format", default="safetensors", choices=("safetensors", "bin"), help="of the model's file")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}

    from tests.distributed.harness import run_ranks
    from tests.distributed.work_host_memory import make_llama

    with tempfile.TemporaryDirectory() as folder:
        pickled = options.format == "bin"
        make_llama(f"{folder}/warm", 16, 1, 64, pickled)
        size = make_llama(f"{folder}/model", 1024, options.layers, 32000, pickled)
        print(
            f"a model of {size / 1e6:,.0f} MB, {options.ranks} ranks; MB over all ranks beyond what there was before\n"
        )
        print("| stage | peak while loading | at rest | peak while saving, beyond it |\n| --- | --- | --- | --- |")
        for stage in options.stages:
            given = {"path": f"{folder}/model", "warm": f"{folder}/warm", "output": f"{folder}/out", "stage": stage}
            found = run_ranks(
                "tests.distributed.work_host_memory:loaded_and_saved", options.ranks, timeout=1800.0, **given
            )[0]
            print(f"| {stage} | " + " | ".join(f"{found[name] / 1e6:,.0f}" for name in found) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
