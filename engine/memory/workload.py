"""The sizes of a PPO step, and the machines that it runs on. The memory plan depends only on these and on the
engines."""

from dataclasses import dataclass

from engine.memory.gpus import reserved
from engine.memory.passes import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The lengths and batch sizes of a PPO step, and how responses are generated.

    prompt, response: the largest number of tokens in a prompt and in a response.
    generated: the number of responses that a rank decodes at the same time.
    responses: the number of responses that a rank generates in a step.
    micro_batch: the number of rows in one forward and backward pass.
    mini_batches: the number of optimizer steps in each of the ppo_epochs.
    critic_passes: (epochs, mini-batches) of the critic if they differ from the actor's, else None.
    texts: whether the actor also learns from texts, each as long as prompt and response together.
    backend, between_steps: as in `build_rollouts`.
    parts: the number of ranks among which vLLM divides the actor.
    group: the number of ranks that hold a copy together (`tensor_parallel` of `build_rollouts`).
    evaluated: the number of held-out prompts on all ranks together.
    checkpoints: whether checkpoints are written from copies of the state in host memory, while training goes on.
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
    checkpoints: bool = False

    @property
    def rows(self) -> Rows:
        """The rows of a pass that computes experience or trains."""
        return Rows(min(self.micro_batch, self.responses), self.prompt, self.response)

    @property
    def decoded(self) -> Rows:
        """The rows that a rank decodes at the same time."""
        return Rows(min(self.generated, self.responses), self.prompt, self.response)

    @property
    def ranks_together(self) -> int:
        """The number of ranks of a node that always hold the actor together. It must divide the number of ranks on a
        node."""
        return {"vllm": self.parts, "replica": self.group or 1}.get(self.backend, 1)

    def mini_batches_of(self, role: str) -> int:
        """The number of optimizer steps of this model in each epoch."""
        return self.critic_passes[1] if role == "critic" and self.critic_passes else self.mini_batches

    def updates_of(self, role: str) -> int:
        """The number of optimizer steps of this model after each rollout."""
        epochs = self.critic_passes[0] if role == "critic" and self.critic_passes else self.ppo_epochs
        return epochs * self.mini_batches_of(role)

    def passes_of(self, role: str) -> int:
        """The number of forward and backward passes in one optimizer step of this model."""
        return -(-(self.responses // self.mini_batches_of(role)) // self.micro_batch) * (2 if self.texts else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines that a run uses.

    gpus: the number of GPUs in each node.
    gpu: the number of bytes of one GPU, of which a part is reserved (`engine.memory.gpus`). None means that it is not
        known; the plan then does not say whether the run fits.
    host: the number of bytes of a node's host memory, or None if it is not known.
    on_gpu: whether the ranks compute on GPUs. If they do not, device memory is host memory.
    """

    gpus: int = 1
    nodes: int = 1
    gpu: int | None = None
    host: int | None = None
    on_gpu: bool = True

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.gpus * self.nodes

    @property
    def gpu_bytes(self) -> int:
        """The number of bytes of one GPU; 0 if there is no GPU, or if the number is not known."""
        return self.gpu or 0 if self.on_gpu else 0

    @property
    def room(self) -> int | None:
        """The number of bytes that the tensors of a rank can take on its device; None if it is not known."""
        if self.on_gpu:
            return None if self.gpu is None else self.gpu - reserved(self.world)
        return None if self.host is None else self.host // self.gpus
