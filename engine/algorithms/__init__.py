"""A dialect is a frozen dataclass with a field for every algorithmic choice of a PPO run. Each known system has a named
instance.

    dialect = get_dialect("default").override(kl_coef=0.1)

A field that a user sets by a flag overrides the dialect's value. `python -m engine.algorithms` prints the fields of all
dialects; `python -m engine.algorithms deepspeed_chat openai` prints the fields in which these two differ.

dialect.py has the fields with their meanings and values. table.py has the named dialects. checks.py has the conditions
that relate fields to each other and to a run's sizes. algorithm.py has the computations of a PPO step, losses.py the
losses of its optimizer steps.
"""

from engine.algo.advantages import ESTIMATORS, AdvantageEstimator, AdvantageInputs
from engine.algorithms.algorithm import Algorithm
from engine.algorithms.checks import check_conversations, check_effect, check_sizes
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
    "check_conversations",
    "check_effect",
    "check_sizes",
    "end_token_id",
    "get_dialect",
    "parse_settings",
    "token_id",
]
