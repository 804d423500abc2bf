"""Copies that several ranks hold together, beside whole ones: the same tokens, and the bytes on each rank.

    python scripts/trial_tensor_parallel.py                        # 2 ranks, then 4, on CPUs; some minutes on two cores
    deepspeed --num_gpus 4 scripts/trial_tensor_parallel.py        # these ranks, on GPUs where there are some

Makes a deep and narrow model of each family with random weights, loads it under ZeRO-3, and has its whole copy and its
tensor-parallel copy answer the same prompts. Bytes are those of the largest rank: of the copy when it is filled, and at
the peak while it is made and filled, with the weights that are gathered for it. Exit code 1 if a row differs, or a rank
holds more than 1 / N of the weights and 5 % of them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

FAMILIES = ("llama", "qwen2", "opt", "gpt_neox", "mixtral")
ROWS = "TRIAL_TENSOR_PARALLEL_ROWS"  # set where this program starts its ranks: the file that the first one writes to
MARGIN = 0.05  # of the weights, beside 1 / N
RESPONSES = 8  # of each rank
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 40,
    "num_attention_heads": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADER = "| model | ranks | weights, MB | same rows | at rest | at the peak | at most | |\n" + "| --- " * 8 + "|"


def main() -> int:
    """As a rank that a launcher has started, or as what starts ranks; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes, on CPUs (default: 2 4)")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="(default: all)")
    parser.add_argument("--master_port", type=int, default=29500, help="of the process group (default: 29500)")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # as DeepSpeed's launcher gives it
    options = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        return run_rank(options.families)
    print(HEADER, flush=True)
    return max([started(ranks, options) for ranks in options.ranks])


def started(ranks: int, options: argparse.Namespace) -> int:
    """Have so many processes try all families, and print their rows of the table."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        command = [str(Path(sys.executable).with_name("deepspeed")), "--log_level", "critical"]
        command += ["--num_gpus", str(ranks), "--master_port", str(options.master_port)]
        command += [__file__, "--families", *options.families]
        environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", ROWS: file.name}
        ended = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
        found = [json.loads(line) for line in Path(file.name).read_text().splitlines()]
    print("".join(f"{line(row)}\n" for row in found), end="", flush=True)
    if len(found) < len(options.families):
        print(ended.stdout[-3000:] + ended.stderr[-3000:], file=sys.stderr)
        return 1
    return int(any(not holds(row) for row in found))


def run_rank(families: list[str]) -> int:
    """Try the families on the ranks of the launcher; the first rank prints the table, or writes its rows."""
    from engine import distributed
    from engine.zero.communication import init

    init()
    found = []
    with tempfile.TemporaryDirectory() as own:
        folder = Path(distributed.broadcast_object(own))
        for family in families:
            found.append(row := tried(family, folder / family))
            if distributed.is_main() and ROWS in os.environ:
                with Path(os.environ[ROWS]).open("a") as file:
                    file.write(json.dumps(row) + "\n")
        distributed.barrier()
    if distributed.is_main() and ROWS not in os.environ:
        print(HEADER, *map(line, found), sep="\n", flush=True)
    distributed.shutdown()
    return int(any(not holds(row) for row in found))


def tried(family: str, folder: Path) -> dict:
    """A family's row of the table, the same on all ranks."""
    from engine import distributed
    from engine.memory.passes import LiveBytes
    from engine.models.loading import load_policy
    from engine.models.tensor_parallel import bare_model
    from engine.rlhf_engine import EngineSpec, frozen_model
    from engine.rollout import ReplicaRollouts
    from engine.tensor_parallel_copies import TensorParallelCopies
    from engine.zero.config import EngineConfig
    from engine.zero.gathering import full_numel

    if distributed.is_main():
        save_model(family, folder)
    distributed.barrier()
    spec = EngineSpec(actor_path=str(folder), critic_path=None, with_critic=False, with_reward_model=False)
    actor = frozen_model(load_policy, spec.actor_path, EngineConfig("actor", 3), spec)
    copies, bare = TensorParallelCopies(distributed.world_size()), bare_model(actor.module)
    with (
        # Shapes on the meta device are no bytes; and of models as small as these a bucket is one weight.
        mock.patch("engine.tensor_parallel_copies.bare_model", lambda module: bare),
        mock.patch("engine.zero.gathering.GATHER_BUCKET", 1),
        LiveBytes() as live,
    ):
        part = copies.of(actor)
    assert part is not None, "no memory for a copy"
    rest = sum(tensor.nbytes for tensor in (*part.parameters(), *part.buffers()))
    tokenizer = make_tokenizer()
    same = compared(ReplicaRollouts(actor, tokenizer), ReplicaRollouts(actor, tokenizer, copies=copies))
    size = sum(full_numel(weight) * weight.element_size() for weight in actor.module.parameters())
    ranks = distributed.all_gather_objects((rest, live.peak.total(), same))
    return {
        "family": family,
        "ranks": distributed.world_size(),
        "size": size,
        "rest": max(rest for rest, _, _ in ranks) / size,
        "peak": max(peak for _, peak, _ in ranks) / size,
        "same": sum(same for _, _, same in ranks),
        "rows": RESPONSES * len(ranks),
    }


def compared(whole, divided) -> int:
    """Of how many of this rank's rows both backends draw the same tokens."""
    from engine import distributed
    from engine.rollout import SamplingConfig

    sampling = SamplingConfig(max_new_tokens=24, pad_token_id=0, stop_token_ids=tuple(range(2, 256, 32)), seed=7)
    prompts = prompts_of(distributed.rank())
    answers = []
    for backend in (whole, divided):
        rollout = backend.generate(prompts, sampling)
        answers.append([row[mask].tolist() for row, mask in zip(rollout.responses, rollout.response_mask, strict=True)])
    assert max(map(len, answers[0])) > 12, "responses are too short to compare"
    return sum(one == other for one, other in zip(*answers, strict=True))


def prompts_of(rank: int):
    """A rank's prompts, of 2 to 17 tokens."""
    import torch

    from engine import distributed
    from training.data.prompts import collate_prompts

    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(2, 18, (RESPONSES,), generator=generator).tolist()
    tokens = [torch.randint(4, SHAPE["vocab_size"], (length,), generator=generator).tolist() for length in lengths]
    indices = torch.arange(RESPONSES) + RESPONSES * rank
    return collate_prompts(tokens, indices, torch.zeros(RESPONSES, dtype=torch.int64), 0).to(distributed.device())


def make_tokenizer():
    """Of the models' vocabulary."""
    from scripts import benchmark_models

    return benchmark_models.make_tokenizer(SHAPE["vocab_size"])


def save_model(family: str, folder: Path) -> None:
    """A model of this family with random weights, vectors too, and its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    grouped = {"num_key_value_heads": 4, "intermediate_size": 176}
    own = {
        "llama": grouped,
        "qwen2": grouped | {"tie_word_embeddings": True},
        "opt": {"ffn_dim": 256, "word_embed_proj_dim": SHAPE["hidden_size"], "tie_word_embeddings": True},
        "gpt_neox": {"intermediate_size": 256},
        "mixtral": grouped | {"num_local_experts": 4, "intermediate_size": 64},
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE, **own[family]), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
            else:
                weight.normal_(mean=0.0 if name.endswith("bias") else 1.0, std=0.1)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def holds(row: dict) -> bool:
    """Whether all rows are the same, and no rank has more than its part."""
    return row["same"] == row["rows"] and max(row["rest"], row["peak"]) <= 1 / row["ranks"] + MARGIN


def line(row: dict) -> str:
    """A row of the table, in words."""
    alike = "yes" if row["same"] == row["rows"] else "no"
    cells = [row["family"], str(row["ranks"]), f"{row['size'] / 1e6:.1f}", f"{alike}, {row['same']} of {row['rows']}"]
    cells += [f"{share:.3f}" for share in (row["rest"], row["peak"], 1 / row["ranks"] + MARGIN)]
    return f"| {' | '.join(cells)} | {'pass' if holds(row) else 'FAIL'} |"


if __name__ == "__main__":
    sys.exit(main())
