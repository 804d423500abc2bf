"""How far the policy has gone from the reference, and how sure it has become."""

from collections.abc import Mapping, Sequence

from training.reporting.health.curves import ALARM, LOOK, Finding, at_end, at_start, mean

KL_FAR = 30.0
"""Nats a response: what the policy answers is e^30 = 10^13 times likelier than the reference made it."""
KL_FAR_A_TOKEN = 0.5
"""Nats a token: at every token the policy is, on average, 1.6 times surer of its choice than the reference was."""
KL_GROWTH, KL_SMALL = 1.5, 5.0
"""Growth over the last quarter, where the KL should settle; below so many nats it is the learning itself."""
KL_MOVED = 0.5
"""Nats a response, below which the policy is hardly another: a response is 1.6 times likelier than it was."""
KL_NEGATIVE = -0.5
"""The estimate's mean is a KL, which is not negative; rounding and noise leave a little, not half a nat."""
ENTROPY_KEPT = 0.4
"""Share of the entropy at the start. Sharpening to half is ordinary, and to a third leaves little to explore."""
ENTROPY_GREW = 1.5
"""A policy that gets so much less sure is losing the language rather than exploring."""


def reference_moved(rows: Sequence[Mapping]) -> bool:
    """Whether KL is, by the end, measured to another reference than at the start: a refresh lowers it, and it does not
    tell how far the policy is from the model that training started from."""
    return (at_end(rows, "objective/reference_moves") or 0.0) > 0.0


def kl_far(rows: Sequence[Mapping]) -> Finding | None:
    """The policy has left the neighbourhood in which the reward model was trained."""
    kl, a_token = at_end(rows, "objective/kl"), at_end(rows, "objective/kl_per_token")
    if kl is None or (kl <= KL_FAR and (a_token is None or a_token <= KL_FAR_A_TOKEN)):
        return None
    moved = ", which has moved: the model that training started from is further away" if reference_moved(rows) else ""
    return Finding(
        ALARM,
        f"KL to the reference ended at {kl:.3g} nats a response, {a_token or 0:.2g} a token{moved}",
        "So far away the reward model's scores mean little: read samples/, then raise --kl_coef, lower "
        "--actor_learning_rate, or have the coefficient steered to a KL of your choice (--set kl_controller=adaptive "
        "kl_target=6); a restart point of before (--save_steps) keeps what was reached, and --max_kl ends a run that "
        "goes so far.",
    )


def kl_negative(rows: Sequence[Mapping]) -> Finding | None:
    """The sampler and the log-probs do not belong to the same distribution."""
    kl = at_end(rows, "objective/kl")
    if kl is None or kl >= KL_NEGATIVE:
        return None
    return Finding(
        ALARM,
        f"KL to the reference ended at {kl:.3g} nats a response: a KL is not negative, so responses "
        "are sampled from something else than their log-probs say",
        "Look at --temperature and the dialect's temperature_in_logprobs.",
    )


def kl_growing(rows: Sequence[Mapping]) -> Finding | None:
    """No balance between score and KL penalty by the end; with a reference that moves there is none to be reached."""
    if reference_moved(rows):
        return None
    before, after = mean(rows, "objective/kl", 0.7, 0.8), at_end(rows, "objective/kl")
    if before is None or after <= KL_SMALL or after <= KL_GROWTH * max(before, 0.0):
        return None
    return Finding(
        LOOK,
        f"KL to the reference was still growing fast: {before:.3g} nats a response three quarters "
        f"through, {after:.3g} at the end",
        "Raise --kl_coef or lower --actor_learning_rate; look whether the held-out score grew with it. Where it is the "
        "KL that is wanted and not the coefficient, --set kl_controller=adaptive kl_target=6 steers to it.",
    )


def entropy_fell(rows: Sequence[Mapping]) -> Finding | None:
    """The policy has become sure of everything."""
    first, last = at_start(rows, "objective/entropy"), at_end(rows, "objective/entropy")
    if first is None or first <= 0 or last >= ENTROPY_KEPT * first:
        return None
    return Finding(
        LOOK,
        f"entropy fell from {first:.3g} to {last:.3g} nats a token ({last / first:.0%} of its start): responses become "
        "alike, and nothing new is tried",
        "Raise --kl_coef, lower --actor_learning_rate or --ppo_epochs.",
    )


def entropy_rose(rows: Sequence[Mapping]) -> Finding | None:
    """The policy has become sure of nothing."""
    first, last = at_start(rows, "objective/entropy"), at_end(rows, "objective/entropy")
    if first is None or first <= 0 or last <= ENTROPY_GREW * first:
        return None
    return Finding(
        LOOK,
        f"entropy rose from {first:.3g} to {last:.3g} nats a token ({last / first:.3g} times its start): the policy "
        "may be losing its language",
        "Read samples/; raise --kl_coef or lower --actor_learning_rate.",
    )
