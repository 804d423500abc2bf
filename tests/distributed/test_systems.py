"""Every dialect through PPOTrainer on one and on two ranks: its gradients are those of a straight-line version.

The versions compute in loops, in float64, with Hugging Face models and no engine, by each system's own order of work.
What the systems do to single rows (`row_of`) is what tests/engine/algorithms/test_systems.py has.
"""

from dataclasses import replace

import pytest
import torch

from engine.experience import Rollout
from scripts.harness.models import PAD
from scripts.harness.ranks import run_ranks
from tests.distributed import plain
from tests.distributed.work_systems import MICRO_BATCH, MINI_BATCHES, SCORE_WEIGHT, moved
from tests.engine import fake_models
from tests.engine.algorithms.test_systems import CLIP, STOPS, SYSTEM_EOS, SYSTEMS, dialect_of, gae, row_of, whitened

T = 7
PROMPTS = [[11, 12, 13], [14], [15, 16], [15, 16], [17, 18, 19, 20], [21, 22], [23], [24, 25, 26]]
STOPPED = [
    [5, 6, 7, SYSTEM_EOS],
    [8, 9, 10, 11, 12, 13],
    [5, SYSTEM_EOS],
    [4, 30, 31, 32, 33, 34, SYSTEM_EOS],
    [40, 41, SYSTEM_EOS],
    [42, 43, 44, 45, SYSTEM_EOS],
    [46, 47, 48, 49, 50, 51],
    [52, SYSTEM_EOS],
]
FIXED = [
    [5, 6, 7, SYSTEM_EOS, 8, 9, 10],
    [8, 9, 10, 11, 12, 13, 14],
    [5, SYSTEM_EOS, 30, 31, SYSTEM_EOS, 32, 33],
    [4, 30, 31, 32, 33, 34, SYSTEM_EOS],
    [40, 41, SYSTEM_EOS, 42, 43, 44, 45],
    [42, 43, 44, 45, SYSTEM_EOS, 46, 47],
    [46, 47, 48, 49, 50, 51, 52],
    [52, 53] * 3 + [54],
]

WORLDS = (1, 2)
CLOSE = 1e-5


def tokens_of(system: str) -> list[list[int]]:
    """All ranks' responses, as the system's sampler gives them."""
    if system == "deepspeed_chat_2023":  # never gives EOS
        return [[3 if token == SYSTEM_EOS else token for token in row] for row in FIXED]
    return STOPPED if system in STOPS else FIXED


def cut(system: str, row: list[int]) -> list[int]:
    """What of a row is scored: dialect_of gives those that cut EOS as their token, openai from slot 2 on."""
    after = 2 if system == "openai" else 0
    if system not in ("openai", "summarize", "trl_ppo", "trl_rloo") or SYSTEM_EOS not in row[after:]:
        return row
    return row[: row.index(SYSTEM_EOS, after) + 1]


def dealt(world: int, rows: int = len(PROMPTS)) -> list[range]:
    """Each rank's rows."""
    share = rows // world
    return [range(rank * share, (rank + 1) * share) for rank in range(world)]


def rollout_of(rows: list[list[int]], numbers: range, prompts: list[list[int]] = PROMPTS) -> Rollout:
    """These rows as one rank has them: as wide as its longest."""
    own = [rows[i] for i in numbers]
    ended = torch.tensor([row[-1] == SYSTEM_EOS for row in own])
    rollout = fake_models.rollout_of([prompts[i] for i in numbers], own, PAD)
    return replace(rollout, ended=ended, indices=torch.tensor(list(numbers)))


def case_dialect(system: str):
    return dialect_of(system).override(ppo_epochs=1, mini_batches=MINI_BATCHES.get(system, 1))


@pytest.fixture(scope="module", params=WORLDS)
def world(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def found(folder, world) -> list[dict]:
    cases = {
        system: (case_dialect(system), [rollout_of(tokens_of(system), rows) for rows in dealt(world)])
        for system in SYSTEMS
    }
    return run_ranks("tests.distributed.work_systems:gradients_of_all", world=world, folder=folder, cases=cases)


class Models:
    """All that the models say, in float64, of all rows; `new` and `new_values` carry gradients.

    texts: what of each row is scored.
    """

    def __init__(
        self,
        folder: str,
        rows: list[list[int]],
        texts: list[list[int]],
        temperature: float,
        prompts: list[list[int]] = PROMPTS,
    ):
        # Slots behind a response: what the models say of padding, which is masked, as the engines have it.
        wide = rollout_of([row + [PAD] * (T - len(row)) for row in rows], range(len(rows)), prompts)
        mask = torch.tensor([[t < len(row) for t in range(T)] for row in rows])
        wide = wide.cut(mask, wide.ended, PAD)
        self.policy, self.critic = plain.policy(folder), plain.critic(folder)
        with torch.no_grad():
            self.ref = plain.logprobs(self.policy, wide, temperature)
            self.scores = SCORE_WEIGHT * self._scores([prompt + text for prompt, text in zip(prompts, texts)])
            moving = [(self.policy, weights_of(self.policy)), (self.critic, weights_of(self.critic))]
            put(moving, "rollout")
            self.old = plain.logprobs(self.policy, wide, temperature)
            self.values = plain.values(self.critic, wide)
            put(moving, "learning")
        self.new = plain.logprobs(self.policy, wide, temperature)
        self.new_values = plain.values(self.critic, wide)

    @classmethod
    def of(cls, folder: str, system: str) -> "Models":
        """As a system samples and scores."""
        rows, dialect = tokens_of(system), dialect_of(system)
        return cls(folder, rows, [cut(system, row) for row in rows], dialect.logprob_temperature)

    def _scores(self, rows: list[list[int]]) -> torch.Tensor:
        """(N,), each text alone: the value at its last token."""
        texts = [torch.tensor([row]) for row in rows]
        hidden = [self.critic.model(input_ids=text).last_hidden_state.double()[0, -1] for text in texts]
        return torch.stack([self.critic.score.weight[0] @ state + self.critic.config.score_offset for state in hidden])


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().float() for name, parameter in model.named_parameters()}


def put(models: list[tuple], phase: str) -> None:
    for model, saved in models:
        new = moved(saved, phase)
        for name, parameter in model.named_parameters():
            parameter.copy_(new[name].double())


def straight(system: str, models: Models, world: int, mini_batch: list[list[int]]) -> dict[str, torch.Tensor]:
    """The losses of one optimizer step, by role; mini_batch: the rows of each rank (numbers of all rows), in order."""
    rows = tokens_of(system)
    lengths = [len(cut(system, row)) if system not in ("openai", "deepspeed_chat_2023") else T for row in rows]
    n = {"old": models.old.detach(), "ref": models.ref, "values": models.values.detach(), "scores": models.scores}
    r, v, width = {}, {}, {}
    for own in dealt(world):
        for i in own:
            width[i] = max(len(rows[j]) for j in own)
            r[i], v[i] = row_of(system, rows[i], lengths[i], width[i], n, i)
    if system == "trl_rloo":
        return {"actor": rloo(models, r, lengths, mini_batch)}
    advantages, returns = estimate(system, r, v, lengths, width, world, mini_batch)
    past = system in ("summarize", "trl_ppo")
    policy, value = {}, {}
    for i in sum(mini_batch, []):
        policy[i], value[i] = [], []
        for t in range(lengths[i]):
            rho = (models.new[i, t] - models.old[i, t]).exp()
            a = advantages[i][t]
            policy[i].append(torch.maximum(-a * rho, -a * rho.clamp(1 - CLIP, 1 + CLIP)))
        for t in range(min(lengths[i] + past, width[i])):
            new, old = models.new_values[i, t], v[i][t]
            near = new.clamp(old - CLIP, old + CLIP)
            value[i].append(0.5 * torch.maximum((new - returns[i][t]) ** 2, (near - returns[i][t]) ** 2))
    factor = 0.1 if system in ("openai", "summarize", "trl_ppo") else 1.0
    return {"actor": joined(system, policy, mini_batch), "critic": factor * joined(system, value, mini_batch)}


def micro_batches(own: list[int]) -> list[list[int]]:
    return [own[start : start + MICRO_BATCH] for start in range(0, len(own), MICRO_BATCH)]


def joined(system: str, losses: dict, mini_batch: list[list[int]]) -> torch.Tensor:
    """One number from all slots' losses."""
    if system == "default":
        everything = sum((losses[i] for own in mini_batch for i in own), [])
        return sum(everything) / len(everything)
    means = []
    for own in mini_batch:
        parts = [sum((losses[i] for i in part), []) for part in micro_batches(own)]
        means.append([sum(part) / len(part) for part in parts])
    if system == "trlx":
        return sum(sum(of_rank) for of_rank in means) / len(means)
    return sum(sum(of_rank) / len(of_rank) for of_rank in means) / len(means)


def estimate(
    system: str, r: dict, v: dict, lengths: list, width: dict, world: int, mini_batch: list[list[int]]
) -> tuple[dict, dict]:
    """Advantages and returns of the mini-batch's rows."""
    if system == "openai":
        for own in mini_batch:
            r |= zip(own, whitened([r[i] for i in own], sum((r[i] for i in own), []), False, keep_mean=True))
    a = {i: gae(r[i], v[i]) for i in r}
    returns = {i: [x + y for x, y in zip(a[i], v[i])] for i in r}

    def white(rows: list[int], pool: list[float], unbiased: bool = False) -> None:
        white_rows.update(zip(rows, whitened([a[i] for i in rows], pool, unbiased)))

    white_rows, ranks = {}, dealt(world)
    if system.startswith("deepspeed_chat"):
        white_rows = a
    elif system == "default":
        white(list(a), [a[i][t] for i in a for t in range(lengths[i])])
    elif system == "openai":
        for own in mini_batch:
            white(own, sum((a[i] for i in own), []))
    elif system == "trlx":
        for parts in zip(*map(micro_batches, mini_batch)):  # the same micro-batch of all ranks
            padded = {i: min(max(lengths[j] for j in part) + 2, width[i]) for part in parts for i in part}
            pool = [x for part in parts for i in part for x in a[i][: padded[i]]]
            white(sum(parts, []), pool, unbiased=world == 1)
    else:
        for own in ranks:
            white(list(own), [a[i][t] for i in own for t in range(lengths[i])], unbiased=system == "trl_ppo")
    return white_rows, returns


def rloo(models: Models, r: dict, lengths: list, mini_batch: list[list[int]]) -> torch.Tensor:
    """Rows 2 i and 2 i + 1 answer one prompt: each one's baseline is the other's reward."""
    losses = {}
    for i in sum(mini_batch, []):
        a = sum(r[i]) - sum(r[i ^ 1])
        rho = sum(models.new[i, t] - models.old[i, t] for t in range(lengths[i])).exp()
        losses[i] = [torch.maximum(-a * rho, -a * rho.clamp(1 - CLIP, 1 + CLIP))]
    return joined("trl_rloo", losses, mini_batch)


@pytest.mark.parametrize("system", SYSTEMS)
def test_gradients_of_a_whole_step(folder, found, world, system):
    models = Models.of(folder, system)
    steps = [rank[system] for rank in found]
    assert {len(own) for own in steps} == {MINI_BATCHES.get(system, 1)}
    for number in range(MINI_BATCHES.get(system, 1)):
        mini_batch = [[own[i] for i in of_rank[number]["rows"]] for own, of_rank in zip(dealt(world), steps)]
        losses = straight(system, models, world, mini_batch)
        for role, loss in losses.items():
            model = models.policy if role == "actor" else models.critic
            named = dict(model.named_parameters())
            expected = dict(zip(named, torch.autograd.grad(loss, list(named.values()), retain_graph=True)))
            assert plain.norm(expected) > 1e-2
            for of_rank in steps:
                assert plain.relative_error(of_rank[number][role], expected) < CLOSE
        assert ("critic" in steps[0][number]) == (system != "trl_rloo")


def test_the_case_is_hard_enough(folder):
    """Ratios and values beyond their clips, scores beyond theirs, a KL of some size."""
    models = Models.of(folder, "default")
    learned = torch.tensor([[t < len(row) for t in range(T)] for row in STOPPED])
    with torch.no_grad():
        assert (((models.new - models.old).exp() - 1).abs() > CLIP)[learned].sum() >= 5
        assert ((models.new_values - models.values).abs() > CLIP)[learned].sum() >= 5
        assert (models.scores.abs() > 5).any() and (models.scores.abs() < 5).any()
        assert ((models.old - models.ref).abs() > 0.05)[learned].sum() >= 10
