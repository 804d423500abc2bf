"""The flags of the service."""

import ipaddress
import re
from dataclasses import dataclass

from engine.errors import UserError
from engine.rollout import DECODING
from training.config.flags import TokenizerFlags, flag

TAKEN = ("prompt", "messages", "seed")  # what stands beside the models in the answer of PUT /


@dataclass(kw_only=True)
class ServeFlags(TokenizerFlags):
    """Which models are served, where, and how much may be asked of them."""

    models: list[str] = flag(
        [],
        "models to answer with, each as NAME=PATH: a folder, an adapter's folder, the output folder of a run (its "
        "actor), a checkpoint, or a name on the Hub",
        group="models",
    )
    reward_model_name_or_path: str | None = flag(
        None, "the reward model that scores responses; also a checkpoint of step 2"
    )
    device: str | None = flag(None, "cpu, cuda or cuda:1; by default the first GPU, or the CPU where there is none")
    dtype: str | None = flag(
        None,
        "what models compute in; by default bf16 on GPUs that have it, fp16 on others, fp32 on CPUs",
        choices=("fp32", "fp16", "bf16"),
    )
    decoding: str = flag(
        "auto",
        "how single tokens go through a model, as in step 3: plain, recorded (auto on CPUs) or graphs (auto on GPUs)",
        choices=DECODING,
    )

    host: str = flag(
        "127.0.0.1",
        "address to listen at; there is no password: others than 127.0.0.1 let others in",
        group="the service",
    )
    port: int = flag(8000, "port to listen at; 0 for a free one, which is printed", least=0, most=65535)
    drain_seconds: float = flag(
        60.0,
        "after TERM or Ctrl-C: how long requests that were accepted may take to be finished; new ones get 503",
        above=0,
    )

    max_seq_len: int = flag(
        2048,
        "most tokens of a prompt and its response together; what a model or the reward model has fewer positions for "
        "is fewer",
        group="limits",
        least=2,
    )
    max_answer_seq_len: int = flag(
        256, "most tokens of a response; also how many it may have where a request does not say", least=1
    )
    rows_at_once: int = flag(
        16,
        "responses of each model that are decoded side by side, and texts in one forward pass of the reward model",
        least=1,
    )
    queue_size: int = flag(
        512, "responses and texts to score that may be in the making or wait, over all requests; beyond, 429", least=1
    )
    max_connections: int = flag(512, "connections at once; beyond, 503", least=1)
    max_body_mb: float = flag(4.0, "largest body of a request, in MB; beyond, 413", above=0)
    body_seconds: float = flag(
        30.0,
        "how long a request's body may take to arrive; beyond, 408; also its head, and a client that reads nothing of "
        "its answer, whose connections are then broken off",
        above=0,
    )

    def validate(self) -> None:
        """Raise UserError for values that cannot work."""
        super().validate()
        if not self.models and self.reward_model_name_or_path is None:
            raise UserError("there is nothing to serve: give --models NAME=PATH, --reward_model_name_or_path, or both.")
        self.paths_by_name()
        if self.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise UserError(f"--device {self.device}: give cpu, cuda, or cuda:N for a GPU by its number.")

    def paths_by_name(self) -> dict[str, str]:
        """The paths of --models by their names, in their order. Raises: UserError for what is not NAME=PATH."""
        found: dict[str, str] = {}
        for word in self.models:
            name, sign, path = word.partition("=")
            if not sign or not path or re.fullmatch(r"[A-Za-z0-9][\w.:-]*", name) is None:
                raise UserError(
                    f"--models {word}: give NAME=PATH, such as sft=out/sft; names have letters, digits and . _ : -"
                )
            if name in TAKEN:
                raise UserError(f"--models {word}: {name} is taken by the form of answers. Give another name.")
            if name in found:
                raise UserError(f"--models {word}: the name {name} is given twice.")
            found[name] = path
        return found

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
