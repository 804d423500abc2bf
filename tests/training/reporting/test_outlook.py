"""What the health report says of a run that is well: on its way, or settled."""

import pytest

from tests.training.reporting.good_run import run
from training.reporting.health import FINE, health

# Of runs that are well: what a longer run, or another coefficient, would bring.
OUTLOOKS = {
    "both still rise": ("a longer run (--max_steps) goes further", {}),
    "both have settled": (
        "a lower --kl_coef goes further",
        {"objective_scores": lambda t: min(8 * t, 2.0), "objective_kl": lambda t: min(32 * t, 8.0)},
    ),
    "the score has settled, KL falls": (
        "The score has settled (at 2, over the last two thirds); KL fell from 2 to 1.6 nats a response",
        # The last two thirds are 27 of the 40 steps: the halves are steps 14-26 and 28-40.
        {
            "objective_scores": lambda t: min(8 * t, 2.0),
            "objective_kl": lambda t: min(8 * t, 2.0) if round(39 * t) < 26 else 1.6,
        },
    ),
    "both fall": (
        None,
        {"objective_scores": lambda t: min(8 * t, 2.5 - t), "objective_kl": lambda t: min(32 * t, 8.0 - 3 * t)},
    ),
    "settled without a penalty": (
        None,
        {
            "objective_scores": lambda t: min(8 * t, 2.0),
            "objective_kl": lambda t: min(32 * t, 8.0),
            "objective_kl_coef": lambda t: 0.0,
        },
    ),
    "the score alone rises": (
        "and KL did not (at 8 nats a response): a longer run (--max_steps) reaches more at the same KL",
        {"objective_kl": lambda t: min(32 * t, 8.0)},
    ),
    "the score rises, and the reference has moved": (
        "The reference has moved, so that KL does not tell how far",
        {"objective_kl": lambda t: 4 * ((8 * t) % 1), "objective_reference_moves": lambda t: 8 * t // 1},
    ),
    "all has settled, and the reference has moved": (
        None,
        {
            "objective_scores": lambda t: min(8 * t, 2.0),
            "objective_kl": lambda t: min(32 * t, 8.0),
            "objective_reference_moves": lambda t: 8 * t // 1,
        },
    ),
    "the KL alone rises": (None, {"objective_scores": lambda t: min(8 * t, 2.0)}),
    "KL is flat only since the learning rate is": (
        "reaches more at the same KL",
        {"objective_scores": lambda t: 4 * t * (1 - t / 2), "objective_kl": lambda t: 4 * min(t, 0.7)},
    ),
}


@pytest.mark.parametrize("advice, curves", OUTLOOKS.values(), ids=OUTLOOKS)
def test_what_a_run_that_is_well_is_told(advice, curves):
    (finding,) = health(run(**curves))
    assert finding.severity == FINE
    assert advice in finding.advice if advice else finding.advice == ""


def test_too_few_steps_have_no_outlook():
    (finding,) = health(run(7, objective_scores=lambda t: min(8 * t, 2.0), objective_kl=lambda t: min(32 * t, 8.0)))
    assert (finding.severity, finding.advice) == (FINE, "")
