"""What a step of PPO goes through, and on how many GPUs: all that memory depends on beside the engines."""

from dataclasses import dataclass

from engine.memory.gpus import reserved
from engine.memory.passes import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Lengths and batches of a step, and how responses are generated.

    prompt, response: the most tokens of each. generated: responses that a rank decodes side by side. responses: those
    that a rank makes in a step. micro_batch: rows of one forward and backward pass. mini_batches: optimizer steps of
    each of the ppo_epochs. critic_passes: epochs and mini-batches of the critic, where it has its own. texts: whether
    the actor learns from texts too, as long as prompt and response. backend,
    between_steps: as `build_rollouts` has them. evaluated: held-out prompts, over all ranks. parts: ranks over which
    vLLM spreads the actor. group: ranks that are to hold a copy together, as `build_rollouts` has it.
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
        """Of a pass that makes experience or trains."""
        return Rows(min(self.micro_batch, self.responses), self.prompt, self.response)

    @property
    def decoded(self) -> Rows:
        """Rows that are decoded side by side."""
        return Rows(min(self.generated, self.responses), self.prompt, self.response)

    @property
    def ranks_together(self) -> int:
        """Ranks of a node that hold the actor together in any case, and so have to divide the node's."""
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

    gpus: of each node. gpu: bytes of one, of which a part is reserved (`engine.memory.gpus`); None where that is not
    known, and then nothing is said of what fits. host: bytes of a node's memory, or None. on_gpu: whether the ranks
    compute on GPUs at all: else device and host are one.
    """

    gpus: int = 1
    nodes: int = 1
    gpu: int | None = None
    host: int | None = None
    on_gpu: bool = True

    @property
    def world(self) -> int:
        """Ranks."""
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
