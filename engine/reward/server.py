"""Scores from a reward server, asked over HTTP.

settings = ServerSettings(urls=["http://10.0.0.7:8000/score"], form="items", columns=["answer"])
reward = ServerReward(settings, tokenizer, rows=ConcatDataset([training_rows, held_out_rows]))
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine import distributed
from engine.errors import UserError, without_query
from engine.experience import Rollout
from engine.reward.agreed import stop_together
from engine.reward.base import RewardSource
from engine.reward.early import EarlyCalls, Numbers
from engine.reward.server_forms import FORMS, Item
from engine.reward.servers import ServerError, Servers
from engine.reward.texts import decoded
from engine.trace import traced

PROBE_SECONDS = 10.0  # that a server may take to be there before a run is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """urls: of servers that say the same, and share the work. form: of `server_forms.FORMS`. columns: of the data, sent
    along. batch_size: the most responses in a request. timeout, patience: seconds, as in `Servers`."""

    urls: Sequence[str]
    form: str = "items"
    columns: Sequence[str] = ()
    batch_size: int = 64
    timeout: float = 180.0
    patience: float = 600.0

    def item(self, id: str, prompt: str, response: str, row: dict | None, ended: bool = True) -> Item:
        """What is sent of a response; row: of the data, of which the columns are taken; null where it lacks one."""
        return Item(id, prompt, response, {name: (row or {}).get(name) for name in self.columns}, ended)


class ServerReward(RewardSource):
    """Asks for all of a step's responses of this rank before the other models compute, and waits when they are done.

    Each rank asks for its own responses, in requests of at most `batch_size`, one at a time of each server.

    rows: the data's, as in FunctionReward; needed where there are columns.
    """

    def __init__(self, settings: ServerSettings, tokenizer, rows: Sequence[dict] | None = None):
        assert not settings.columns or rows is not None, f"columns {settings.columns}, and no rows were given"
        self.settings, self.tokenizer, self.rows = settings, tokenizer, rows
        self.servers = Servers(settings.urls, settings.form, timeout=settings.timeout, patience=settings.patience)
        self._early = EarlyCalls(threads=len(self.servers))
        self._turn = distributed.rank()  # so that ranks begin with different servers

    @traced("reward server")
    def score(self, rollout: Rollout) -> Tensor:
        """(B,) float32, as the servers gave them.

        Raises: RunStopped on all ranks where one gets no scores.
        """
        keys, items = self._items(rollout)
        self._begin(keys, items)
        values, problem = self._early.taken(keys, items)
        contract = "Nothing was learned from these responses. docs/reward_server.md has what is sent and answered."
        stop_together(problem, "the reward server", contract)
        scores = [values[place] for place in range(len(items))]
        return torch.tensor(scores, dtype=torch.float32, device=rollout.sequences.device)

    def prepare(self, rollout: Rollout) -> None:
        """As in RewardSource: requests are begun for responses that there are none for yet."""
        self._begin(*self._items(rollout))

    def begin(self, rollout: Rollout) -> None:
        """As in RewardSource."""
        self.prepare(rollout)

    def _items(self, rollout: Rollout) -> tuple[list[tuple[int, int]], list[Item]]:
        keys = list(zip(rollout.indices.tolist(), rollout.samples.tolist(), strict=True))
        texts = zip(*decoded(rollout, self.tokenizer, FORMS[self.settings.form].special_tokens), strict=True)
        rows = self.rows if self.settings.columns else None
        items = [
            self.settings.item(f"{index}.{sample}", *pair, None if rows is None else rows[index], ended)
            for (index, sample), pair, ended in zip(keys, texts, rollout.ended.tolist(), strict=True)
        ]
        return keys, items

    def _begin(self, keys: list[tuple[int, int]], items: list[Item]) -> None:
        """Requests for those that there are none for, as many for each server."""
        left = self._early.left(keys, items)
        size = min(self.settings.batch_size, -(-len(left) // len(self.servers)))
        for start in range(0, len(left), max(size, 1)):
            part = left[start : start + size]
            asked = [items[place] for place in part]
            self._early.begin([keys[place] for place in part], asked, partial(self._asked, asked, self._turn))
            self._turn += 1

    def _asked(self, items: list[Item], turn: int) -> Numbers:
        try:
            return self.servers.ask(items, turn), None
        except ServerError as error:
            return [], str(error)
        except Exception as error:  # on this rank alone: the others would wait for it in vain
            return [], f"could not be asked ({type(error).__name__}: {error})"


def probe(settings: ServerSettings, prompt: str, row: dict) -> dict[str, float]:
    """What each server says of one text, by its URL: the prompt with the response "probe".

    Raises: UserError where one is not there within PROBE_SECONDS, or answers what is no score.
    """
    found = {}
    for url in settings.urls:
        patience = min(settings.patience, PROBE_SECONDS)
        servers = Servers([url], settings.form, timeout=min(settings.timeout, PROBE_SECONDS), patience=patience)
        try:
            found[url] = servers.probe(settings.item("probe", prompt, "probe", row))
        except ServerError as error:
            raise UserError(
                f"--reward_url {without_query(url)}: asked for the score of one text, {error}. Start the server, "
                f"or mend it, or give another URL or --reward_url_form (this one is {settings.form})."
            ) from None
    return found
