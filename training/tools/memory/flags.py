"""The flags of the memory planner."""

from dataclasses import dataclass

from engine.errors import UserError
from training.config.flags import flag
from training.config.step3 import RLHFFlags
from training.tools.memory.cluster import OLD, Cluster, gpu_bytes, parsed_bytes

SEARCHES = ("batch", "gpus")
LEAST_HOST = 10**9  # bytes; if --host_memory is smaller, the unit was probably forgotten


@dataclass(kw_only=True)
class MemoryFlags(RLHFFlags):
    """The flags of the memory planner: step 3's flags (those for data and output may be omitted), and flags that
    describe the machines."""

    output_dir: str = flag("memory_plan", "nothing is written")
    data_path: list[str] = flag([], "nothing is read")

    gpu: str = flag(
        "a100-80g",
        "a GPU's name, such as a100-40g, v100-32g or h100-80g, or its memory, such as 24GB or 23.6GiB",
        group="machines",
    )
    num_gpus: int = flag(1, "GPUs per node", least=1)
    num_nodes: int = flag(1, "number of nodes", least=1)
    host_memory: str | None = flag(
        None, "host memory of a node, such as 512GB; without it the plan does not say whether host memory suffices"
    )
    search: str | None = flag(
        None,
        "what to look for. batch: the largest power of two that fits as --per_device_generation_batch_size and "
        "--per_device_training_batch_size. gpus: the fewest GPUs (1, 2, 4 and so on, in nodes of 8)",
        choices=SEARCHES,
    )

    def validate(self) -> None:
        """Raise UserError for values that cannot work."""
        super().validate()
        gpu_bytes(self.gpu)
        if self.host_memory is not None and (parsed_bytes(self.host_memory) or 0) < LEAST_HOST:
            raise UserError(
                f"--host_memory {self.host_memory}: give a node's memory in bytes, with a unit, as 512GB or 503GiB."
            )

    @property
    def gpus(self) -> int:
        """The number of GPUs of all nodes."""
        return self.num_gpus * self.num_nodes

    @property
    def cluster(self) -> Cluster:
        """The machines that the flags describe."""
        host = parsed_bytes(self.host_memory) if self.host_memory is not None else None
        old = self.gpu.strip().lower().startswith(OLD)
        return Cluster(gpus=self.num_gpus, nodes=self.num_nodes, gpu=gpu_bytes(self.gpu), host=host, old=old)
