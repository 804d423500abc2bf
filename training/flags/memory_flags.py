"""The flags of the memory planner: step 3's, and which machines."""

from dataclasses import dataclass

from engine.errors import UserError
from engine.memory.gpus import gpu_bytes, parsed_bytes
from training.flags.arguments import flag
from training.flags.rlhf_arguments import RLHFFlags

SEARCHES = ("batch", "gpus")
LEAST_HOST = 10**9  # bytes; a smaller number was given without its unit


@dataclass(kw_only=True)
class MemoryFlags(RLHFFlags):
    """Step 3's flags, of which those of data and output may be left out, and the machines."""

    output_dir: str = flag("memory_plan", "nothing is written")
    data_path: list[str] = flag([], "nothing is read")

    gpu: str = flag(
        "a100-80g", "one GPU: a name such as a100-40g, v100-32g or h100-80g, or bytes: 24GB, 23.6GiB", group="machines"
    )
    num_gpus: int = flag(1, "GPUs of a node")
    num_nodes: int = flag(1, "nodes")
    host_memory: str | None = flag(
        None, "memory of a node, such as 512GB; by default nothing is said of whether it fits"
    )
    search: str | None = flag(
        None,
        "look for the largest batches that fit (batch: --per_device_generation_batch_size and "
        "--per_device_training_batch_size together), or for the fewest GPUs (gpus)",
        choices=SEARCHES,
    )
    json: bool = flag(False, "print the plan as JSON, in bytes")

    def validate(self) -> None:
        """Raise UserError for values that cannot work."""
        RLHFFlags.validate(self)
        self.at_least(1, "num_gpus", "num_nodes")
        gpu_bytes(self.gpu)
        if self.host_memory is not None and (parsed_bytes(self.host_memory) or 0) < LEAST_HOST:
            raise UserError(
                f"--host_memory {self.host_memory}: give a node's memory in bytes, with a unit, as 512GB or 503GiB."
            )

    @property
    def host_bytes(self) -> int | None:
        """What --host_memory says."""
        return parsed_bytes(self.host_memory) if self.host_memory is not None else None
