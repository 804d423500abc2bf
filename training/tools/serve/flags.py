"""The flags of the service."""

import ipaddress
import re
from dataclasses import dataclass

from engine.errors import UserError
from engine.rollout import DECODING
from training.config.flags import TokenizerFlags, flag

TAKEN = ("prompt", "messages", "seed")  # other fields in the answer of PUT /, which no model may have as its name


@dataclass(kw_only=True)
class ServeFlags(TokenizerFlags):
    """The flags that say which models are served, at which address, and how much may be requested."""

    models: list[str] = flag(
        [],
        "models that answer, each as NAME=PATH: a folder, an adapter's folder, the output folder of a run (its "
        "actor), a checkpoint, or a name on the Hub",
        group="models",
    )
    reward_model_name_or_path: str | None = flag(
        None, "reward model that scores responses; may be a checkpoint of step 2"
    )
    device: str | None = flag(None, "cpu, cuda or cuda:1; by default the first GPU, or the CPU where there is none")
    dtype: str | None = flag(
        None,
        "dtype that models compute in; by default bf16 on GPUs that have it, fp16 on other GPUs, fp32 on CPUs",
        choices=("fp32", "fp16", "bf16"),
    )
    decoding: str = flag(
        "auto",
        "how single tokens go through a model, as in step 3: plain, recorded (auto on CPUs) or graphs (auto on GPUs)",
        choices=DECODING,
    )

    host: str = flag(
        "127.0.0.1",
        "address to listen at. There is no password: with another address than 127.0.0.1, other machines can connect",
        group="the service",
    )
    port: int = flag(8000, "port to listen at; 0: a free one, which is printed", least=0, most=65535)
    drain_seconds: float = flag(
        60.0,
        "seconds in which accepted requests may finish after TERM or Ctrl-C; new requests are answered 503",
        above=0,
    )

    max_seq_len: int = flag(
        2048,
        "most tokens of prompt and response together; fewer for all models if one of them, or the reward model, has "
        "fewer positions",
        group="limits",
        least=2,
    )
    max_answer_seq_len: int = flag(
        256, "most tokens of a response, and the limit of a request that gives none", least=1
    )
    rows_at_once: int = flag(
        16,
        "responses that each model decodes at the same time, and texts in one forward pass of the reward model",
        least=1,
    )
    queue_size: int = flag(
        512,
        "most responses and texts to score, over all requests, that are computed or wait; further requests are "
        "answered 429",
        least=1,
    )
    max_connections: int = flag(512, "most connections at once; further ones are answered 503", least=1)
    max_body_mb: float = flag(4.0, "largest body of a request, in MB; a larger one is answered 413", above=0)
    body_seconds: float = flag(
        30.0,
        "seconds in which a request's body has to arrive; a later one is answered 408. A connection is closed if "
        "the request's head takes longer, or if the client reads nothing of its answer for so long",
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
        """{name: path} of --models, in the given order. Raises: UserError for an entry that is not NAME=PATH."""
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
