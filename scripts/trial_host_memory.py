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

    with tempfile.TemporaryDirectory() as folder:
        size = make_models(Path(folder), options.layers, options.format)
        print(f"a model of {size / 1e6:,.0f} MB, {options.ranks} ranks; MB over all ranks beyond what there was before\n")
        print("| stage | peak while loading | at rest | peak while saving, beyond it |\n| --- | --- | --- | --- |")
        for stage in options.stages:
            given = {"path": f"{folder}/model", "warm": f"{folder}/warm", "output": f"{folder}/out", "stage": stage}
            found = run_ranks(
                "tests.distributed.work_host_memory:loaded_and_saved", options.ranks, timeout=1800.0, **given
            )[0]
            print(f"| {stage} | " + " | ".join(f"{found[name] / 1e6:,.0f}" for name in found) + " |", flush=True)
    return 0


def make_models(folder: Path, layers: int, format: str) -> int:
    """Write a Llama with random weights and a tiny one; returns the bytes of the larger one's weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.tiny_models import make_tokenizer

    for name, width, count, words in (("warm", 16, 1, 200), ("model", 1024, layers, 32000)):
        config = LlamaConfig(
            vocab_size=words,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=count,
            num_attention_heads=8,
            max_position_embeddings=128,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
        )
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model = model.to_empty(device="cpu")
        for index, parameter in enumerate(model.parameters()):
            torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(index))
        model.save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)
        if format == "bin":
            (folder / name / "model.safetensors").unlink()
            torch.save(model.state_dict(), folder / name / "pytorch_model.bin")
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


if __name__ == "__main__":
    sys.exit(main())
