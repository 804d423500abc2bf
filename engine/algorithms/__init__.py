"""Dialects: every algorithmic choice of a PPO run as a field of one frozen dataclass, with a named instance for each
known system.

    dialect = get_dialect("default").override(kl_coef=0.1)

A field that a user gives by flag overrides the dialect's value. `python -m engine.algorithms` prints the table, and
`python -m engine.algorithms deepspeed_chat openai` where two systems differ.

dialect.py has the fields with their meanings and values, table.py the systems, checks.py the conditions between fields
and on a run's sizes. algorithm.py has the computations of a step, losses.py those of an optimizer step.
"""

from engine.algo.advantages import ESTIMATORS, AdvantageEstimator, AdvantageInputs
from engine.algorithms.algorithm import Algorithm
from engine.algorithms.checks import check_effect, check_sizes
from engine.algorithms.dialect import Dialect, end_token_id, parse_settings, token_id
from engine.algorithms.table import DIALECTS, NOTES, get_dialect

__all__ = [
    "DIALECTS",
    "ESTIMATORS",
    "NOTES",
    "AdvantageEstimator",
    "AdvantageInputs",
    "Algorithm",
    "Dialect",
    "check_effect",
    "check_sizes",
    "end_token_id",
    "get_dialect",
    "parse_settings",
    "token_id",
]
