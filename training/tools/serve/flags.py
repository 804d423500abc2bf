"""The flags of the service."""

import ipaddress
from dataclasses import dataclass

from engine.errors import UserError
from training.config.flags import TokenizerFlags, flag
from training.tools.models import named


@dataclass(kw_only=True)
class ServeFlags(TokenizerFlags):
    """The flags that say which models are served, at which address, and how much a request may ask for."""

    models: list[str] = flag(
        [],
        "models that answer, each as NAME=PATH or PATH: the folder of a model, an adapter or a run (its actor), a "
        "checkpoint, or a name on the Hub",
        group="models",
    )
    reward_model_name_or_path: str | None = flag(
        None, "reward model that scores responses; may be a checkpoint of step 2"
    )
    dtype: str | None = flag(
        None,
        "dtype that models compute in; by default bf16 on GPUs that have it, fp16 on other GPUs, fp32 on CPUs",
        choices=("fp32", "fp16", "bf16"),
    )

    host: str = flag(
        "127.0.0.1",
        "address to listen at; there is no password. With another address than 127.0.0.1, other machines can connect",
        group="the service",
    )
    port: int = flag(8000, "port to listen at; 0: a free one, which is printed", least=0, most=65535)

    max_seq_len: int = flag(
        2048,
        "most tokens of prompt and response together; fewer for all models if one of them, or a reward model that gets "
        "their token ids, has fewer positions. A reward model that gets texts reads up to twice as many and 64",
        group="limits",
        least=2,
    )
    max_answer_seq_len: int = flag(
        256, "most tokens of a response, and the limit of a request that gives none", least=1
    )
    max_body_mb: float = flag(4.0, "largest body of a request, in MB; a larger one is answered 413", above=0)

    def validate(self) -> None:
        """Raise UserError for values that cannot work."""
        super().validate()
        if not self.models and self.reward_model_name_or_path is None:
            raise UserError("there is nothing to serve: give --models NAME=PATH, --reward_model_name_or_path, or both.")
        named(self.models)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
