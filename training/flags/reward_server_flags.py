"""The flags of reward servers: where they are, what they are sent, and how long they are waited for."""

import dataclasses
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from engine.errors import UserError, without_query
from engine.reward.server import FORMS, OWN_FIELDS, ServerSettings
from training.flags.arguments import flag
from training.flags.reward_function_flags import RewardFunctionFlags


@dataclass(kw_only=True)
class RewardServerFlags(RewardFunctionFlags):
    """Scores from elsewhere, in the place of the reward model or beside it."""

    reward_url: list[str] = flag(
        [],
        "where a reward server is sent responses, http://HOST:PORT/PATH (docs/reward_server.md); several servers that "
        "say the same share the work, and one that is away is left out while others answer",
        group="reward server",
    )
    reward_url_form: str = flag(
        "items",
        "the form of requests and answers: ours, in which ids say which score is whose (items), or OpenRLHF's "
        "(openrlhf)",
        choices=FORMS,
    )
    reward_url_columns: list[str] = flag(
        [], "columns of the data that are sent along; with the form openrlhf one, as labels"
    )
    reward_url_batch_size: int = flag(64, "the most responses in one request")
    reward_url_timeout: float = flag(180.0, "seconds in which a request has to be answered")
    reward_url_patience: float = flag(
        600.0,
        "for how many seconds a request is made again that cannot be delivered or is answered 429 or 5xx, before the "
        "run stops with a restart point",
    )

    def validate_server(self) -> None:
        """Raise UserError for URLs that are none, and for values that cannot work."""
        for url in self.reward_url:
            check_reward_url(url)
        if len(set(self.reward_url)) < len(self.reward_url):
            raise UserError(
                f"--reward_url {' '.join(map(without_query, self.reward_url))}: one is given twice. Give it once."
            )
        self.at_least(1, "reward_url_batch_size")
        self.above(0, "reward_url_timeout")
        self.finite("reward_url_timeout")
        self.at_least(0, "reward_url_patience")
        columns, most = self.reward_url_columns, FORMS[self.reward_url_form].most_columns
        said = f"--reward_url_columns {' '.join(columns)}"
        if taken := [name for name in columns if name in OWN_FIELDS and self.reward_url_form == "items"]:
            raise UserError(f"{said}: {taken[0]} is what something else in a request is called. Leave it out.")
        if most is not None and len(columns) > most:
            raise UserError(
                f"{said}: {len(columns)} columns, and the form {self.reward_url_form} has room for {most}. Name {most}."
            )
        for spec in dataclasses.fields(RewardServerFlags) if not self.reward_url else ():
            usual = [] if spec.default is dataclasses.MISSING else spec.default
            if spec.name.startswith("reward_url_") and getattr(self, spec.name) != usual:
                raise UserError(f"--{spec.name} needs --reward_url: there is no reward server.")

    @property
    def other_rewards(self) -> list[str]:
        """Functions, and then the server."""
        return [*self.reward_function, *self.reward_url[:1]]

    def reward_server(self) -> ServerSettings | None:
        """What is to be known of the servers; None where there are none."""
        if not self.reward_url:
            return None
        return ServerSettings(
            urls=self.reward_url,
            form=self.reward_url_form,
            columns=self.reward_url_columns,
            batch_size=self.reward_url_batch_size,
            timeout=self.reward_url_timeout,
            patience=self.reward_url_patience,
        )


def check_reward_url(url: str) -> None:
    """Raise UserError for what is no URL of a server, or holds a user's name; a password or key in it is not shown."""
    shown = re.sub("//.*@[^/]*", "//...", url).partition("?")[0]
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        parts, whole = urlsplit(""), False
    if not whole or parts.fragment or not url.isascii() or not url.isprintable() or " " in url:
        raise UserError(f"--reward_url {shown}: is no URL of a server. Give http://HOST:PORT/PATH.")
    if parts.username is not None or parts.password is not None:
        raise UserError(
            f"--reward_url {shown}: holds a user's name, which would stand in messages and files. Leave it out."
        )
