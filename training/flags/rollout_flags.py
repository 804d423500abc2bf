"""The flags of rollouts: which backend draws responses, and how."""

import os
from dataclasses import dataclass

from engine.errors import UserError
from engine.rollout import DECODING, ROLLOUT_BACKENDS, SAMPLERS
from engine.zero.accelerator import ranks_of_this_machine
from training.flags import deepspeed_chat
from training.flags.arguments import RunFlags, flag

# Flags that say nothing to another backend: the flag, its usual value, and the backends that it is for.
_OF_COPIES = ("auto", "replica", "zero3")
_OWN = {
    "decoding": ("auto", _OF_COPIES),
    "replicas_between_steps": ("keep", _OF_COPIES),
    "overlap_rewards": (False, _OF_COPIES),
    "inference_tp_size": (None, ("auto", "replica")),
    "vllm_tensor_parallel_size": (1, ("vllm",)),
    "vllm_sampler": ("keyed", ("vllm",)),
}


@dataclass(kw_only=True)
class RolloutFlags(RunFlags):
    """By which backend responses are drawn, and what is said to it."""

    rollout_backend: str = flag(
        "auto",
        "how responses are generated: with a whole copy of the actor on each rank, gathered once per update "
        "(replica), through its ZeRO-3 partitions (zero3), or by vLLM in these processes (vllm, which has to be "
        "installed); auto takes the copy where it fits in memory, else one that several ranks hold together "
        "(--inference_tp_size), else the partitions",
        choices=ROLLOUT_BACKENDS,
        group="rollouts",
        old_values=deepspeed_chat.OLD_BACKENDS,
    )
    decoding: str = flag(
        "auto",
        "how single tokens go through a whole copy: by the model's own code (plain), by a recording of its "
        "operations (recorded; auto on CPUs), or by CUDA graphs of it (graphs; auto on GPUs)",
        choices=DECODING,
    )
    replicas_between_steps: str = flag(
        "keep",
        "what becomes of the whole copies that responses and experience are made with, while actor and critic train",
        choices=("keep", "free", "host"),
    )
    inference_tp_size: int | None = flag(
        None,
        "how many neighbouring ranks of a node hold a copy of a model together, each a part of every matrix (tensor "
        "parallelism): with --rollout_backend replica always, with auto where no whole copy fits on a rank; by "
        "default there as few as it fits on, and 1 is never",
    )
    vllm_tensor_parallel_size: int = flag(
        1, "over how many neighbouring ranks of a node vLLM spreads the actor, with --rollout_backend vllm"
    )
    vllm_sampler: str = flag(
        "keyed",
        "what draws in vLLM: our random numbers, which give the rows that the other backends give, up to rounding "
        "(keyed), or its own sampler (own)",
        choices=SAMPLERS,
    )

    def validate_rollouts(self) -> None:
        """Raise UserError for values that cannot work, alone or together."""
        for name, (usual, backends) in _OWN.items():
            if self.rollout_backend not in backends and getattr(self, name) != usual:
                raise UserError(
                    f"--{name} {getattr(self, name)} with --rollout_backend {self.rollout_backend}: it is for "
                    f"{', '.join(backends)} alone. Leave it out."
                )
        self.at_least(1, "vllm_tensor_parallel_size", "inference_tp_size")
        if "RANK" in os.environ:  # not in a program that plans for other machines
            self.check_groups(ranks_of_this_machine())
        self._validate_decoding()

    def check_groups(self, ranks: int) -> None:
        """Raise UserError where a node's ranks cannot be divided into the groups that were asked for."""
        name = {"replica": "inference_tp_size", "vllm": "vllm_tensor_parallel_size"}.get(self.rollout_backend)
        parts = name and getattr(self, name)
        if parts and ranks % parts:
            raise UserError(
                f"--{name} {parts}: the {ranks} ranks of a node cannot be divided into groups of {parts}. Give a "
                f"number that divides {ranks}."
            )

    def _validate_decoding(self) -> None:
        if self.decoding not in ("recorded", "graphs"):
            return
        if self.replicas_between_steps != "keep":
            raise UserError(
                f"--decoding {self.decoding} with --replicas_between_steps {self.replicas_between_steps}: "
                "such passes belong to weights that stay where they are. Leave one of them out."
            )
        if self.rollout_backend == "zero3":
            raise UserError(
                f"--decoding {self.decoding} with --rollout_backend zero3: ZeRO's hooks cannot be "
                f"{self.decoding}. Leave one of them out."
            )
