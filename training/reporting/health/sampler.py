"""How far the sampler, whose responses are learned from, is from the policy that learns."""

from collections.abc import Mapping, Sequence

from training.reporting.health.curves import ALARM, LOOK, Finding, at_end

GAP = 0.05
"""Nats a token, in the mean: bf16 stays under a hundredth with models of a few layers, and far under this with many."""
FAR = 0.01
"""Share of tokens whose ratio is not even between a half and two: of 100 tokens one would be clipped before anything is
learned."""
CUT = 0.1
"""Share of tokens whose ratio a correction cuts: a bound is for outliers, and cutting many is a bias of its own."""
ANOTHER = 0.1
"""Share of such tokens in samples of what is rather another policy than the same one rounded."""


def sampler_apart(rows: Sequence[Mapping]) -> Finding | None:
    """Responses are drawn from a distribution that is not quite the actor's."""
    gap, far = at_end(rows, "rollout/logprob_gap"), at_end(rows, "rollout/ratio_far")
    if gap is None or far is None or (gap <= GAP and far <= FAR):
        return None
    kl, lowest, highest = (at_end(rows, f"rollout/{name}") for name in ("sampler_kl", "ratio_min", "ratio_max"))
    seen = f"the sampler's log-probs ended {gap:.3g} nats a token from the actor's"
    if kl is not None and lowest is not None and highest is not None:
        seen += f" (KL {kl:.2g}), with ratios from {lowest:.2g} to {highest:.3g}, {far:.1%} of them outside 0.5 to 2"
    return Finding(
        ALARM if far > ANOTHER else LOOK,
        seen,
        "Rounding explains hundredths of a nat: see that the sampler has the actor's weights, and try --dtype fp32 or "
        "another --rollout_backend. Have old log-probs come from a forward pass (--old_logprobs forward), and weigh "
        "what was drawn by the ratios (--set correction=token_truncate).",
    )


def much_cut(rows: Sequence[Mapping]) -> Finding | None:
    """A correction of the sampler's distance that cuts more than it corrects."""
    cut = at_end(rows, "policy/correction_cut")
    if cut is None or cut <= CUT:
        return None
    return Finding(
        LOOK,
        f"{cut:.0%} of the tokens that were learned from had a ratio to the sampler that was cut or masked",
        "Ratios of whole responses spread with their length: take a correction by token (--set "
        "correction=token_truncate). If it is by token, see that the sampler has the actor's weights.",
    )
