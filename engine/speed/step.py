"""How long a step of PPO takes on ranks: each phase's arithmetic, and what ranks exchange in it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.memory.memory_plan import EnginePlan
from engine.speed.decoding import Decoder, Ranks, divided_token, partitioned_token
from engine.speed.exchanges import Exchanges, partitioned
from engine.speed.part import Part
from engine.speed.rates import Rates

ADAM = 28
"""Bytes that Adam reads and writes of a number: master and moments in float32 both ways, gradient and weight in 16
bits."""
GENERATE, EXPERIENCE, UPDATE, ELSE = 2, 8, 10, 5
"""Small collective calls of a rank in a step: agreements, counts, norms and metrics; UPDATE: of each optimizer step of
both models, ELSE: between phases."""
TRAINED = ("critic", "actor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What each rank does in a step.

    decoders: by role, of those that there are; actor and reference, critic and reward model are of one shape each.
    engines: by role, how they come by their weights; those that are not named are at stage 3, and keep nothing. hosts:
    roles that the engine of another one plays, by role. rows: responses of a rank; decoded: of these side by side.
    prompt, response: tokens. micro_batch: rows of a pass. updates: optimizer steps, each on rows / mini_batches;
    critic_updates: both of the critic, where its steps are not the actor's; texts:
    whether the actor learns from as many texts. whole, divided: roles with a copy, alone or with `group` ranks; own:
    roles whose copy no other model takes turns in; stays: these do also while training. drawing: ranks that hold a
    copy of the actor which only draws, as vLLM does; None for none. checkpointed: whether backward passes compute
    activations again. offloaded: roles whose weights and states are in host memory. scored: whether the actor's
    log-probs are those of a forward pass. moving: whether the reference is other weights in the actor's engine.
    """

    decoders: Mapping[str, Decoder]
    rows: int
    decoded: int
    prompt: int
    response: int
    micro_batch: int
    engines: Mapping[str, EnginePlan] = field(default_factory=dict)
    hosts: Mapping[str, str] = field(default_factory=dict)
    mini_batches: int = 1
    updates: int = 1
    critic_updates: tuple[int, int] | None = None
    texts: bool = False
    whole: frozenset[str] = frozenset()
    divided: frozenset[str] = frozenset()
    group: int = 1
    own: frozenset[str] = frozenset()
    stays: bool = False
    drawing: int | None = None
    checkpointed: bool = False
    offloaded: frozenset[str] = frozenset()
    scored: bool = True
    moving: bool = False

    def parts(self, rates: Rates, ranks: Ranks) -> dict[str, Part]:
        """The parts of a step, in their order, by name."""
        found = {"gather actor": self._filled("actor", rates, ranks)}
        found |= {"prompts": self._prompts(rates, ranks), "tokens": self._tokens(rates, ranks)}
        found["agree on rollouts"] = _agreed(GENERATE, ranks)
        if self._engine("actor").unmerged:
            found["gather actor unmerged"] = self._unmerged(rates, ranks)
        if self.scored:
            found["actor"] = self._scored("actor", rates, ranks)
        for role in ("reference", "critic", "reward"):
            if role in self.decoders:
                found[f"gather {role}"] = self._filled(role, rates, ranks)
                found[role] = self._scored(role, rates, ranks)
        found["agree on experience"] = _agreed(EXPERIENCE, ranks)
        for role in TRAINED:
            if role in self.decoders:
                found[f"train {role}"] = self._trained(role, rates, ranks)
                found[f"step {role}"] = self._stepped(role, rates, ranks.world)
        return found | {"agree on updates": _agreed(self._agreements(), ranks), "metrics": _agreed(ELSE, ranks)}

    def _host(self, role: str) -> str:
        return self.hosts.get(role, role)

    def _engine(self, role: str) -> EnginePlan:
        host = self._host(role)
        return self.engines.get(host) or partitioned(self.decoders[host], trains=host in TRAINED)

    def _exchanges(self, role: str, rates: Rates, ranks: Ranks) -> Exchanges:
        return Exchanges(self.decoders[role], self._engine(role), ranks, self._fetched(role, rates, ranks))

    def _copied(self, role: str) -> bool:
        """Whether experience is made with whole weights: a copy's, or at stages 0 to 2 the engine's own."""
        host = self._host(role)
        return host in self.whole or host in self.divided or self._engine(role).stage < 3

    def _draws_through_partitions(self) -> bool:
        return self.drawing is None and not self._copied("actor")

    def _filled(self, role: str, rates: Rates, ranks: Ranks) -> Part:
        """The role's copy gets its weights, as far as it does not hold them yet."""
        if role == "reference" and self.moving:  # into the actor's copy, which it then gets back by generating
            copied = self._copied("actor") and self._engine("actor").stage == 3 and ranks.world > 1
            return self._exchanges("actor", rates, ranks).filling(self._engine("actor").trains) if copied else Part()
        engine, draws = self._engine(role), role == "actor" and self.drawing is not None
        copied = role in self.whole or role in self.divided or draws
        if not copied or self._host(role) != role or (engine.stage < 3 and not draws) or ranks.world == 1:
            return Part()
        numbers = engine.numbers
        if role in self.own and self.stays:  # what has changed; of merged weights, which are made anew, that is all
            numbers = engine.trains if role in self.whole else numbers * bool(engine.trains)
        return self._exchanges(role, rates, ranks).filling(numbers)

    def _unmerged(self, rates: Rates, ranks: Ranks) -> Part:
        """The actor's whole copy, which has drawn with the adapter merged, gets the matrices as they are."""
        engine = self._engine("actor")
        if "actor" not in self.whole or engine.stage < 3 or ranks.world == 1:
            return Part()
        return self._exchanges("actor", rates, ranks).filling(engine.unmerged)

    def _fetched(self, role: str, rates: Rates, ranks: Ranks) -> float:
        """Seconds until the role's partition is on its GPU."""
        return self.decoders[role].size / ranks.world / rates.host_link if role in self.offloaded else 0.0

    def _prompts(self, rates: Rates, ranks: Ranks) -> Part:
        decoder, turns = self.decoders["actor"], -(-self.rows // self.decoded)
        flops = self.rows * self.prompt * decoder.flops(self.prompt / 2)
        compute = flops / rates.sheet.flops + turns * decoder.layers * rates.layer_start
        if not self._draws_through_partitions() or ranks.world == 1:
            return Part(compute)
        gathered = self._exchanges("actor", rates, ranks).through_partitions(turns, versions=1)
        return gathered.computing(compute, rates.overlaps)

    def _tokens(self, rates: Rates, ranks: Ranks) -> Part:
        """All but the first token of each response: rows take turns where not all are decoded side by side."""
        decoder, turns = self.decoders["actor"], -(-self.rows // self.decoded)
        times, length = turns * (self.response - 1), self.prompt + self.response / 2
        rows, gathered = self.rows / turns, 0.0
        if self._draws_through_partitions() and ranks.world > 1:
            engine = self._engine("actor")
            together = engine.hpz if engine.hpz > 1 else None
            token = partitioned_token(decoder, ranks, rows, length, together)
            latency = (decoder.layers + 2) * ranks.all_gather(0, together)
            gathered = times * decoder.size
        else:
            group = self.drawing or (self.group if "actor" in self.divided else 1)
            token = divided_token(decoder, ranks, rows, length, group)
            latency = (2 * decoder.layers + 1) * ranks.all_reduce(0, group) + ranks.all_gather(0, group)
        compute = max(token.memory, token.arithmetic) + decoder.layers * rates.token_start
        exposed = token.exchange if not token.overlaps else max(0.0, token.exchange - compute)
        share = latency / token.exchange if token.exchange else 0.0
        return Part(times * compute, times * exposed * share, times * exposed * (1 - share), False, gathered)

    def _updates(self, role: str) -> tuple[int, int]:
        """The role's optimizer steps, and the mini-batches of an epoch."""
        return (role == "critic" and self.critic_updates) or (self.updates, self.mini_batches)

    def _agreements(self) -> int:
        """Small calls of all optimizer steps; of one model's alone half of both's."""
        return (self.updates + self._updates("critic")[0]) * UPDATE // 2

    def _passes(self, rows: float) -> int:
        return -(-int(rows) // self.micro_batch)

    def _forward(self, role: str, rows: float, rates: Rates) -> float:
        decoder, length = self.decoders[role], self.prompt + self.response
        start = self._passes(rows) * decoder.layers * rates.layer_start
        return rows * length * decoder.flops(length / 2) / rates.sheet.flops + start

    def _scored(self, role: str, rates: Rates, ranks: Ranks) -> Part:
        compute = self._forward(role, self.rows, rates)
        if self._copied(role) or ranks.world == 1:
            return Part(compute)
        known = role not in TRAINED or (role == "actor" and self._draws_through_partitions())
        gathered = self._exchanges(role, rates, ranks).through_partitions(self._passes(self.rows), versions=not known)
        return gathered.computing(compute, rates.overlaps)

    def _trained(self, role: str, rates: Rates, ranks: Ranks) -> Part:
        updates, mini_batches = self._updates(role)
        rows = self.rows / mini_batches * (2 if self.texts and role == "actor" else 1)
        compute = updates * self._forward(role, rows, rates) * (4 if self.checkpointed else 3)
        if ranks.world == 1:
            return Part(compute)
        host = self._host(role)
        lent = host in self.whole and host in self.own and self.stays  # until the first update has changed them
        exchanged = self._exchanges(role, rates, ranks).training(
            self._passes(rows), updates, lent, known=not self._copied(role), alone=host == role
        )
        return exchanged.computing(compute, rates.overlaps)

    def _stepped(self, role: str, rates: Rates, world: int) -> Part:
        if self._host(role) != role:
            return Part()
        decoder, share = self.decoders[role], self._updates(role)[0] * self._engine(role).trains / world
        if role in self.offloaded:  # gradients go to the host, and weights come back
            return Part(share * (ADAM / rates.host_adam + 2 * decoder.number / rates.host_link))
        return Part(share * ADAM / rates.adam)


def _agreed(calls: int, ranks: Ranks) -> Part:
    return Part(latency=calls * ranks.all_reduce(8) if ranks.world > 1 else 0.0)
