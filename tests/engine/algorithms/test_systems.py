"""From the models' answers to both gradients, system by system, against straight-line versions in loops and float64;
the same with pad tokens inside responses; and details of lm-human-preferences, with its write-up's numbers.

The versions below follow the systems' own order of work, with their own masks, and know nothing of dialects. Two ranks
hold ragged rows; each rank's minibatch is one micro-batch. Where the layout matters a system's rank is computed apart.

deepspeed_chat: microsoft/DeepSpeedExamples 83757d9c, dschat/rlhf/ppo_trainer.py, `generate_experience`, and
dschat/utils/model/reward_model.py, `forward_value`. trl_ppo, summarize: huggingface/trl f2cd5771, trainer/utils.py,
`get_reward`. trlx: CarperAI/trlx 3340c2f3, accelerate_ppo_trainer.py, `make_experience`.

Source: Huang et al. 2023, "The N Implementation Details of RLHF with PPO"; docs/openai.md has the whole list.
"""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from engine.algo.rewards import positions_after_tokens
from engine.algorithms import Algorithm, get_dialect
from engine.errors import UserError
from engine.experience import position_ids
from engine.models.loading import load_policy, load_scorer
from engine.rollout import SamplingConfig
from scripts.harness.models import EOS, PAD, make_causal_lm, make_scorer
from tests.engine.fake_models import rollout_of

SYSTEM_EOS, SYSTEM_PAD, T, BETA, CLIP = 2, 9, 7, 0.1, 0.2
# Rows of both ranks: what the system's sampler gives. Rows of fixed length go on after EOS; 4 stands for any token.
STOPPED = [[[5, 6, 7, SYSTEM_EOS], [4] * 7], [[5, SYSTEM_EOS], [4, 4, 4, 4, 4, SYSTEM_EOS]]]
FIXED = [
    [[5, 6, 7, SYSTEM_EOS, 4, 4, 4], [4] * 7],
    [[5, SYSTEM_EOS, 4, 4, SYSTEM_EOS, 4, 4], [4, 4, 4, 4, 4, 4, SYSTEM_EOS]],
]
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
    n: dict, a: list, returns: list, kept_values: list, policy_positions: list, value_positions: list, factor: float
) -> tuple:
    """Both losses of one micro-batch, each a mean over its positions, as float64 tensors that carry gradients."""
    policy, value = [], []
    for i in range(2):
        for t in policy_positions[i]:
            rho = (n["new"][i, t] - n["old"][i, t]).exp()
            policy.append(torch.maximum(-a[i][t] * rho, -a[i][t] * rho.clamp(1 - CLIP, 1 + CLIP)))
        for t in value_positions[i]:
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
    elif system == "openai":  # truncate token EOS at or after position 2
        row, place, kept, s = penalties, width - 1, width, s if SYSTEM_EOS in tokens[2:] else -1.0
    elif system in ("summarize", "trl_ppo", "trl_rloo"):
        row, place, kept = penalties[:length], length if length < width else length - 1, length + 1
        s = -1.0 if system == "summarize" and SYSTEM_EOS not in tokens else s
    else:
        row, place, kept = penalties[: length + 1], min(length + 1, width - 1), length + 2
        s = max(-10.0, min(10.0, s))
    row = row + [0.0] * (width - len(row))
    row[place] += s
    return row, [x if t < kept else 0.0 for t, x in enumerate(n["values"][i].tolist()[:width])]


def straight(system: str, ranks: list[int], n: dict[int, dict]) -> dict[int, tuple]:
    """By rank: rewards, values, advantages, and both losses; advantages before whitening give the returns."""
    r, v, policy_positions, value_positions, out = {}, {}, {}, {}, {}
    for k in ranks:
        rows = tokens_of(system, k)
        width, lengths = max(map(len, rows)), [len(row) for row in rows]
        if system == "summarize" or system.startswith("trl_"):  # cut after the first EOS
            lengths = [row.index(SYSTEM_EOS) + 1 if SYSTEM_EOS in row else T for row in rows]
        made = [row_of(system, rows[i], lengths[i], width, n[k], i) for i in range(2)]
        r[k], v[k] = [list(column) for column in zip(*made)]
        past = system in ("summarize", "trl_ppo")
        policy_positions[k] = [range(length) for length in lengths]
        value_positions[k] = [range(min(length + past, width)) for length in lengths]

    if system == "trl_rloo":
        for k in ranks:
            one, two = math.fsum(r[k][0]), math.fsum(r[k][1])
            terms = []
            for i, a in enumerate((one - two, two - one)):
                rho = sum(n[k]["new"][i, t] - n[k]["old"][i, t] for t in policy_positions[k][i]).exp()
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
            pool = [a[k][i][t] for i in range(2) for t in policy_positions[k][i]]
        elif (
            system == "trlx"
        ):  # the tensor of a micro-batch ends two positions after its longest response, or with the row
            pool = [x for j in ranks for row in a[j] for x in row]
        elif system == "default":
            pool = [a[j][i][t] for j in ranks for i in range(2) for t in policy_positions[j][i]]
        unbiased = system == "trl_ppo" or (system == "trlx" and len(ranks) == 1)
        final = a[k] if system.startswith("deepspeed") else whitened(a[k], pool, unbiased)
        factor = 0.1 if system in ("openai", "summarize", "trl_ppo") else 1.0
        losses = ppo_losses(n[k], final, returns[k], v[k], policy_positions[k], value_positions[k], factor)
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
    responses = torch.tensor([row + [SYSTEM_PAD] * (width - len(row)) for row in rows])
    mask = torch.tensor([[t < len(row) for t in range(width)] for row in rows])
    ended = torch.tensor([row[-1] == SYSTEM_EOS for row in rows])
    algorithm = Algorithm(dialect, pad_token_id=SYSTEM_PAD, end_token_id=SYSTEM_EOS, reduce=reduce, ranks=ranks)
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
        if system == "trl_rloo":  # a response's rewards are summed: on which position the score stands does not matter
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


PROMPTS = [[EOS, 11, 12], [EOS, 13, 14, 15], [16, 17]]  # OPT begins each text with a token that is EOS, too
RESPONSES = [[5, PAD, 6, 9], [7, EOS, 8, 8], [EOS, 21, PAD, 22]]


def drawn(pad):
    """A rollout of RESPONSES, and where the first pad token stands in each."""
    first = [row.index(pad) if pad in row else len(row) for row in RESPONSES]
    return rollout_of(PROMPTS, RESPONSES, pad), first


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return make_causal_lm(root / "actor", "opt"), make_scorer(root / "reward", "opt")


def scores(folder, rollout):
    scorer = load_scorer(folder, torch.float32)
    with torch.no_grad():
        by_token = scorer(rollout.sequences, rollout.attention_mask, rollout.position_ids)
    return scorer.sequence_scores(by_token, rollout.sequences, rollout.attention_mask)


@pytest.mark.parametrize("pad", [PAD, EOS])
@pytest.mark.parametrize("system", ["deepspeed_chat", "deepspeed_chat_2023", "trl_ppo", "trl_rloo", "summarize"])
@torch.no_grad()
def test_scores_are_read_before_the_first_pad(folders, system, pad):
    rollout, _ = drawn(pad)
    _, scored = Algorithm(get_dialect(system), pad_token_id=pad, end_token_id=EOS).texts(rollout)
    model = AutoModelForSequenceClassification.from_pretrained(folders[1], dtype=torch.float32).eval()
    hides_pads_of_prompts = system.startswith("deepspeed_chat")
    expected = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        if system == "summarize" and EOS in response:  # `truncate_response`: what follows EOS becomes padding
            response = response[: response.index(EOS) + 1] + [pad] * (len(response) - response.index(EOS) - 1)
        sequence = torch.tensor([prompt + response])
        mask = (sequence != pad).long()
        if not hides_pads_of_prompts:
            mask[:, : len(prompt)] = 1
        values = model.score(model.base_model(sequence, attention_mask=mask)[0])[0, :, 0]
        pads = (sequence[0, len(prompt) :] == pad).nonzero()
        end = pads[0].item() + len(prompt) if len(pads) > 0 else sequence.shape[1]
        expected.append(values[end - 1])
    torch.testing.assert_close(scores(folders[1], scored), torch.stack(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("pad", [PAD, EOS])
@pytest.mark.parametrize("system", ["default", "openai", "trlx"])
def test_others_score_what_was_drawn(system, pad):
    rollout, _ = drawn(pad)
    dialect = get_dialect(system).replaced(truncate_token="", truncate_after=0)
    learned, scored = Algorithm(dialect, pad_token_id=pad, end_token_id=EOS).texts(rollout)
    assert torch.equal(scored.response_mask, rollout.response_mask)
    assert torch.equal(learned.attention_mask, rollout.attention_mask) == (system != "trlx")


@pytest.mark.parametrize("pad", [PAD, EOS])
@pytest.mark.parametrize("system", ["deepspeed_chat", "trlx"])
@torch.no_grad()
def test_pads_are_hidden_from_attention_where_masks_come_from_ids(folders, system, pad):
    rollout, _ = drawn(pad)
    algorithm = Algorithm(get_dialect(system), pad_token_id=pad, end_token_id=EOS)
    learned, _ = algorithm.texts(rollout)
    positions = algorithm.positions(learned.responses, learned.response_mask)
    found, _ = load_policy(folders[0], torch.float32)(
        learned.sequences, learned.attention_mask, learned.position_ids, learned.response_length
    )
    # OPT counts positions along the mask by itself, as the system has it do.
    mask = (learned.sequences != pad).long()
    logits = (
        AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
        .eval()(learned.sequences, attention_mask=mask * rollout.attention_mask)
        .logits
    )
    expected = torch.log_softmax(logits[:, :-1], -1).gather(-1, learned.sequences[:, 1:, None])[..., 0]
    counted = positions.masks.policy
    assert counted.any() and torch.equal(counted, (mask * rollout.attention_mask)[:, -4:].bool())
    # Read at a pad's own place, where each system has another position for it: the token behind a pad is left out.
    compared = counted & positions_after_tokens(counted)
    assert compared.sum() >= 7
    torch.testing.assert_close(found[compared], expected[:, -4:][compared], rtol=0, atol=1e-5)
    select = learned.select(slice(0, 2))  # the two rows whose first token is hidden lose no other
    assert select.attention_mask.sum() == learned.attention_mask[:2].sum()


def test_pads_in_prompts_take_no_other_column_away():
    rollout = rollout_of([[11, PAD, 12], [13, PAD, 14]], [[5], [6]], PAD).without_attention_to(PAD)
    assert rollout.select(slice(None)).sequences.tolist() == [[11, PAD, 12, 5], [13, PAD, 14, 6]]


def test_trlxs_penalty_has_a_hole_behind_a_pad():
    """log_ratio * attention_mask[:, :-1] from the last prompt token on, and ends = start + the mask's sum + 1."""
    tokens = torch.tensor([[11, 12, 5, PAD, 6, 9, PAD, PAD]])
    mask, start = (tokens != PAD).long(), 1
    ends = start + mask[0, start:].sum() + 1
    log_ratio = torch.tensor([[0.1 * position for position in range(1, 8)]]) * mask[:, :-1]
    expected = torch.zeros(6)
    expected[: ends - start] = -0.1 * log_ratio[0, start:ends]
    assert expected.tolist() == pytest.approx([-0.02, -0.03, 0.0, -0.05, -0.06, 0.0], abs=1e-7)

    algorithm = Algorithm(get_dialect("trlx"), pad_token_id=PAD, end_token_id=EOS)
    sampled = torch.tensor([[True] * 4 + [False] * 2])
    positions = algorithm.positions(tokens[:, 2:], sampled)
    ours = torch.tensor([[0.1 * position for position in range(2, 8)]])
    rewards = algorithm.compute_rewards(ours, torch.zeros(1, 6), torch.zeros(1), positions, 0.1)
    torch.testing.assert_close(rewards[0], expected)


def test_log_probs_of_the_sampler_are_not_those_of_hidden_pads():
    dialect = get_dialect("default").override(length_rule="not_pad")
    assert not dialect.takes_sampled_logprobs(exact=True)
    with pytest.raises(UserError, match="old_logprobs 'sampler': length_rule 'not_pad' hides pad tokens"):
        dialect.override(old_logprobs="sampler")


OPENAI = get_dialect("openai")


@torch.no_grad()
def test_scores_and_values_look_at_query_and_response(tmp_path):
    """One response behind two queries that differ in their first token: every value of the response differs."""
    scorer = load_scorer(make_scorer(tmp_path, "gpt2"), torch.float32)
    texts = torch.tensor([[11, 12, 13, 30, 31, 32], [14, 12, 13, 30, 31, 32]])
    mask = torch.ones_like(texts)
    values = scorer(texts, mask, position_ids(mask))
    assert values.shape == (2, 6)
    assert ((values[0] - values[1]).abs() > 1e-3).all()
    scores = scorer.sequence_scores(values, texts, mask)
    assert torch.equal(scores, values[:, -1])
    mask[:, 0] = 0  # without their first tokens the two texts are one
    values = scorer(texts, mask, position_ids(mask))
    torch.testing.assert_close(values[0, 1:], values[1, 1:], rtol=0, atol=1e-6)


def test_the_write_ups_penalty_of_three_tokens():
    """Log-ratios -0.3315, -0.0426, 0.6351 and the score 0.4; the penalty is subtracted, as the code has it (its prose
    leaves the sign out)."""
    reference = torch.tensor([[-3.3213, -4.9980, -3.8690]])
    logprobs = reference + torch.tensor([[-0.3315, -0.0426, 0.6351]])
    responses = torch.tensor([[11, 339, 561]])
    algorithm = Algorithm(OPENAI, pad_token_id=0, end_token_id=13)
    positions = algorithm.positions(responses, torch.ones_like(responses).bool())
    first = algorithm.compute_rewards(reference, reference, torch.tensor([0.4]), positions, 0.15)
    assert first[0].tolist() == pytest.approx([0, 0, 0.4])  # before the first update
    rewards = algorithm.compute_rewards(logprobs, reference, torch.tensor([0.4]), positions, 0.15)
    assert rewards[0].tolist() == pytest.approx([0.15 * 0.3315, 0.15 * 0.0426, 0.4 - 0.15 * 0.6351], abs=1e-6)


def test_responses_have_a_fixed_length_and_the_scores_temperature():
    """No token stops a response, none is forbidden, and log-probs are recorded at the temperature of sampling."""

    def sampling(system: str) -> SamplingConfig:
        return SamplingConfig.of(get_dialect(system), [EOS, 7], "fp32", max_new_tokens=24, pad_token_id=PAD)

    openai = sampling("openai")
    assert (openai.stop_token_ids, openai.never_drawn, openai.max_new_tokens) == ((), (), 24)
    assert openai.temperature == openai.logprob_temperature == 0.7
    assert (sampling("default").stop_token_ids, sampling("default").never_drawn) == ((EOS, 7), ())
    old = sampling("deepspeed_chat_2023")
    assert (old.stop_token_ids, old.never_drawn) == ((), (EOS, 7))
