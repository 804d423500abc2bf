"""From the models' answers to both gradients, system by system, against straight-line versions in loops and float64.

The versions below follow the systems' own order of work, with their own masks, and know nothing of dialects. Two ranks
hold ragged rows; each rank's minibatch is one micro-batch. Where the layout matters a system's rank is computed apart.
"""

import math

import pytest
import torch

from engine.algorithms import Algorithm, get_dialect

EOS, PAD, T, BETA, CLIP = 2, 9, 7, 0.1, 0.2
# Rows of both ranks: what the system's sampler gives. Rows of fixed length go on after EOS; 4 stands for any token.
STOPPED = [[[5, 6, 7, EOS], [4] * 7], [[5, EOS], [4, 4, 4, 4, 4, EOS]]]
FIXED = [[[5, 6, 7, EOS, 4, 4, 4], [4] * 7], [[5, EOS, 4, 4, EOS, 4, 4], [4, 4, 4, 4, 4, 4, EOS]]]
STOPS = ("deepspeed_chat", "trlx", "default")
SYSTEMS = ("default", "deepspeed_chat", "deepspeed_chat_2023", "openai", "summarize", "trlx", "trl_ppo", "trl_rloo")


def numbers(rank: int) -> dict:
    """Models' answers for two rows of this rank: (2, T) float64 each, scores (2,)."""
    generator = torch.Generator().manual_seed(rank)

    def noise(scale):
        return scale * torch.randn(2, T, generator=generator, dtype=torch.float64)

    old = noise(0.5) - 2
    values = noise(1.0)
    return {
        "old": old,
        "ref": old + noise(0.5),
        "values": values,
        "new": old + noise(0.3),
        "new_values": values + noise(0.3),
        "scores": torch.tensor([[1.5, -12.0], [7.0, 0.5]])[rank].double(),
    }


def tokens_of(system: str, rank: int) -> list[list[int]]:
    """Unpadded rows. deepspeed_chat_2023 never gives EOS."""
    if system == "deepspeed_chat_2023":
        return [[4] * 7, [5] * 7]
    return (STOPPED if system in STOPS else FIXED)[rank]


def gae(r: list, v: list) -> list:
    """gamma 1, lambda 0.95."""
    advantages, following = [0.0] * len(r), 0.0
    for t in reversed(range(len(r))):
        error = r[t] + (v[t + 1] if t + 1 < len(r) else 0.0) - v[t]
        advantages[t] = following = error + 0.95 * following
    return advantages


def whitened(rows: list, pool: list, unbiased: bool, keep_mean: bool = False) -> list:
    mean = math.fsum(pool) / len(pool)
    variance = math.fsum((x - mean) ** 2 for x in pool) / (len(pool) - unbiased)
    return [[(x - mean) / math.sqrt(variance + 1e-8) + mean * keep_mean for x in row] for row in rows]


def ppo_losses(
    n: dict, a: list, returns: list, kept_values: list, policy_slots: list, value_slots: list, factor: float
) -> tuple:
    """Both losses of one micro-batch, each a mean over its positions, as float64 tensors that carry gradients."""
    policy, value = [], []
    for i in range(2):
        for t in policy_slots[i]:
            rho = (n["new"][i, t] - n["old"][i, t]).exp()
            policy.append(torch.maximum(-a[i][t] * rho, -a[i][t] * rho.clamp(1 - CLIP, 1 + CLIP)))
        for t in value_slots[i]:
            v, v0 = n["new_values"][i, t], kept_values[i][t]
            near = v.clamp(v0 - CLIP, v0 + CLIP)
            value.append(torch.maximum((v - returns[i][t]) ** 2, (near - returns[i][t]) ** 2))
    return sum(policy) / len(policy), factor * 0.5 * sum(value) / len(value)


def row_of(system: str, tokens: list[int], length: int, width: int, n: dict, i: int) -> tuple[list, list]:
    """One row's rewards, before any whitening, and its values with what the system has after the end."""
    s = n["scores"][i].item()
    penalties = [-BETA * x for x in (n["old"][i] - n["ref"][i]).tolist()[:width]]
    if system == "default":
        row, place, kept, s = penalties[:length], length - 1, length, max(-5.0, min(5.0, s))
    elif system == "deepspeed_chat":
        row, place, kept = penalties[: length + 1], min(length, width - 1), length + 1
        s = max(-5.0, min(5.0, s))
    elif system == "deepspeed_chat_2023":
        row, place, kept, s = penalties, length - 1, width, max(-5.0, min(5.0, s))
    elif system == "openai":  # truncate token EOS at or after slot 2
        row, place, kept, s = penalties, width - 1, width, s if EOS in tokens[2:] else -1.0
    elif system in ("summarize", "trl_ppo", "trl_rloo"):
        row, place, kept = penalties[:length], length if length < width else length - 1, length + 1
        s = -1.0 if system == "summarize" and EOS not in tokens else s
    else:
        row, place, kept = penalties[: length + 1], min(length + 1, width - 1), length + 2
        s = max(-10.0, min(10.0, s))
    row = row + [0.0] * (width - len(row))
    row[place] += s
    return row, [x if t < kept else 0.0 for t, x in enumerate(n["values"][i].tolist()[:width])]


def straight(system: str, ranks: list[int], n: dict[int, dict]) -> dict[int, tuple]:
    """By rank: rewards, values, advantages, and both losses; advantages before whitening give the returns."""
    r, v, policy_slots, value_slots, out = {}, {}, {}, {}, {}
    for k in ranks:
        rows = tokens_of(system, k)
        width, lengths = max(map(len, rows)), [len(row) for row in rows]
        if system == "summarize" or system.startswith("trl_"):  # cut after the first EOS
            lengths = [row.index(EOS) + 1 if EOS in row else T for row in rows]
        made = [row_of(system, rows[i], lengths[i], width, n[k], i) for i in range(2)]
        r[k], v[k] = [list(column) for column in zip(*made)]
        past = system in ("summarize", "trl_ppo")
        policy_slots[k] = [range(length) for length in lengths]
        value_slots[k] = [range(min(length + past, width)) for length in lengths]

    if system == "trl_rloo":
        for k in ranks:
            one, two = math.fsum(r[k][0]), math.fsum(r[k][1])
            terms = []
            for i, a in enumerate((one - two, two - one)):
                rho = sum(n[k]["new"][i, t] - n[k]["old"][i, t] for t in policy_slots[k][i]).exp()
                terms.append(torch.maximum(-a * rho, -a * rho.clamp(1 - CLIP, 1 + CLIP)))
            out[k] = (r[k], None, [[one - two] * T, [two - one] * T], sum(terms) / 2, None)
        return out

    a, returns = {}, {}
    for k in ranks:
        if system == "openai":
            r[k] = whitened(r[k], sum(r[k], []), False, keep_mean=True)
        a[k] = [gae(row, own) for row, own in zip(r[k], v[k])]
        returns[k] = [[x + y for x, y in zip(row, own)] for row, own in zip(a[k], v[k])]
    for k in ranks:
        if system in ("summarize", "trl_ppo", "openai"):
            pool = [a[k][i][t] for i in range(2) for t in policy_slots[k][i]]
        elif system == "trlx":  # the tensor of a micro-batch ends two slots after its longest response, or with the row
            pool = [x for j in ranks for row in a[j] for x in row]
        elif system == "default":
            pool = [a[j][i][t] for j in ranks for i in range(2) for t in policy_slots[j][i]]
        unbiased = system == "trl_ppo" or (system == "trlx" and len(ranks) == 1)
        final = a[k] if system.startswith("deepspeed") else whitened(a[k], pool, unbiased)
        factor = 0.1 if system in ("openai", "summarize", "trl_ppo") else 1.0
        losses = ppo_losses(n[k], final, returns[k], v[k], policy_slots[k], value_slots[k], factor)
        out[k] = (r[k], v[k], final, *losses)
    return out


def dialect_of(system: str):
    cut = {
        "openai": {"truncate_token": "eos", "truncate_after": 2},
        "trl_ppo": {"truncate_token": "eos"},
        "trl_rloo": {"truncate_token": "eos"},
    }
    return get_dialect(system).override(kl_coef=BETA, **cut.get(system, {}))


def ours(system: str, rank: int, n: dict, reduce, ranks: int) -> tuple:
    """What the project computes for one rank, in float32."""
    dialect, rows = dialect_of(system), tokens_of(system, rank)
    width = max(map(len, rows))
    responses = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    mask = torch.tensor([[t < len(row) for t in range(width)] for row in rows])
    ended = torch.tensor([row[-1] == EOS for row in rows])
    algorithm = Algorithm(dialect, pad_token_id=PAD, end_token_id=EOS, reduce=reduce, ranks=ranks)
    scored, ended = algorithm.scored_text(responses, mask, ended)
    positions = algorithm.positions(responses, scored)
    part = {name: tensor[..., :width].float() if tensor.dim() == 2 else tensor.float() for name, tensor in n.items()}
    scores = algorithm.process_scores(part["scores"], ended)
    rewards = algorithm.compute_rewards(part["old"], part["ref"], scores, positions, BETA)
    values = algorithm.kept_values(part["values"] if dialect.has_critic else None, positions)
    advantages, returns = algorithm.compute_advantages(rewards, values, positions.masks)
    new, new_values = part["new"].requires_grad_(), part["new_values"].requires_grad_()
    policy = algorithm.losses.policy_loss(new, part["old"], part["ref"], advantages, positions.masks.policy, BETA)
    value = algorithm.losses.value_loss(new_values, values, returns, positions.masks.value)
    return rewards, values, advantages, positions.masks, policy, value, new, new_values


@pytest.mark.parametrize("ranks", [[0], [0, 1]])
@pytest.mark.parametrize("system", SYSTEMS)
def test_rewards_advantages_losses_and_gradients(system, ranks):
    n = {rank: numbers(rank) for rank in ranks}
    for each in n.values():
        each["new"].requires_grad_()
        each["new_values"].requires_grad_()
    expected = straight(system, ranks, n)
    sent = {}

    def first_pass(rank):
        def record(totals):
            sent[rank] = totals
            return totals

        return record

    for rank in ranks:  # what each rank would send, then the sum that each would get
        ours(system, rank, {name: tensor.detach() for name, tensor in n[rank].items()}, first_pass(rank), len(ranks))
    for rank in ranks:
        got = ours(
            system,
            rank,
            {name: tensor.detach() for name, tensor in n[rank].items()},
            lambda totals: sum(sent.values()),
            len(ranks),
        )
        rewards, values, advantages, masks, policy, value, new, new_values = got
        want_rewards, want_values, want_advantages, want_policy, want_value = expected[rank]
        width = rewards.shape[1]
        if system == "trl_rloo":  # a response's rewards are summed: on which slot the score stands does not matter
            assert rewards.sum(-1).tolist() == pytest.approx([math.fsum(row) for row in want_rewards], abs=1e-5)
        elif system != "openai":  # whose rewards the version above has whitened
            close(rewards, want_rewards)
        learned = masks.policy
        close(advantages[learned], torch.tensor(want_advantages, dtype=torch.float64)[learned])
        (policy.loss / policy.count).backward()
        want_policy.backward()
        assert (policy.loss / policy.count).item() == pytest.approx(want_policy.item(), abs=1e-5)
        close(new.grad, n[rank]["new"].grad[:, :width])
        assert new.grad.abs().max() > 1e-2
        if want_value is not None:
            close(values, want_values)
            (value.loss / value.count).backward()
            want_value.backward()
            assert (value.loss / value.count).item() == pytest.approx(want_value.item(), abs=1e-5)
            close(new_values.grad, n[rank]["new_values"].grad[:, :width])
            assert new_values.grad.abs().max() > 1e-3


def close(tensor: torch.Tensor, expected) -> None:
    torch.testing.assert_close(tensor.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5)
