"""The sizes of a PPO step and the machines that it runs on: all that memory depends on beside the engines."""

from dataclasses import dataclass

from engine.memory.gpus import reserved
from engine.memory.passes import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Lengths and batches of a step, and how responses are generated.

    prompt, response: the most tokens of each. generated: responses that a rank decodes side by side. responses:
    responses that a rank makes in a step. micro_batch: rows of one forward and backward pass. mini_batches: optimizer
    steps in each of the ppo_epochs. critic_passes: epochs and mini-batches of the critic, where it has its own. texts:
    whether the actor also learns from texts, each as long as prompt and response. backend, between_steps: as in
    `build_rollouts`. evaluated: held-out prompts, over all ranks. parts: ranks over which vLLM spreads the actor.
    group: how many ranks hold a copy together (`tensor_parallel` of `build_rollouts`).
    """

    prompt: int
    response: int
    generated: int
    responses: int
    micro_batch: int
    mini_batches: int = 1
    ppo_epochs: int = 1
    critic_passes: tuple[int, int] | None = None
    texts: bool = False
    backend: str = "auto"
    between_steps: str = "keep"
    parts: int = 1
    group: int | None = None
    evaluated: int = 0

    @property
    def rows(self) -> Rows:
        """The rows of a pass that makes experience or trains."""
        return Rows(min(self.micro_batch, self.responses), self.prompt, self.response)

    @property
    def decoded(self) -> Rows:
        """The rows that are decoded side by side."""
        return Rows(min(self.generated, self.responses), self.prompt, self.response)

    @property
    def ranks_together(self) -> int:
        """How many ranks of a node always hold the actor together; their number has to divide that of the node's
        ranks."""
        return {"vllm": self.parts, "replica": self.group or 1}.get(self.backend, 1)

    def mini_batches_of(self, role: str) -> int:
        """Optimizer steps of this model in each epoch."""
        return self.critic_passes[1] if role == "critic" and self.critic_passes else self.mini_batches

    def updates_of(self, role: str) -> int:
        """Optimizer steps of this model after each rollout."""
        epochs = self.critic_passes[0] if role == "critic" and self.critic_passes else self.ppo_epochs
        return epochs * self.mini_batches_of(role)

    def passes_of(self, role: str) -> int:
        """Forward and backward passes of one optimizer step of this model."""
        return -(-(self.responses // self.mini_batches_of(role)) // self.micro_batch) * (2 if self.texts else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines.

    gpus: how many each node has. gpu: bytes of one GPU, of which a part is reserved (`engine.memory.gpus`); None if not
    known, and then the plan does not say whether the run fits. host: bytes of a node's memory, or None. on_gpu: whether
    the ranks compute on GPUs; otherwise device and host are the same memory.
    """

    gpus: int = 1
    nodes: int = 1
    gpu: int | None = None
    host: int | None = None
    on_gpu: bool = True

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.gpus * self.nodes

    @property
    def gpu_bytes(self) -> int:
        """The memory of one GPU in bytes; 0 where there is none, or it is not known."""
        return self.gpu or 0 if self.on_gpu else 0

    @property
    def room(self) -> int | None:
        """Bytes that a rank's tensors can have on its device; None where that is not known."""
        if self.on_gpu:
            return None if self.gpu is None else self.gpu - reserved(self.world)
        return None if self.host is None else self.host // self.gpus
