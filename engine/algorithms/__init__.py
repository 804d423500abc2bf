"""Every algorithmic choice of a PPO run, under names: one frozen dataclass, one row per known system.

    dialect = get_dialect("default").override(kl_coef=0.1)

A field that a user gives by flag overrides the dialect's value. `python -m engine.algorithms` prints the table, and
`python -m engine.algorithms deepspeed_chat openai` where two systems differ.

dialect.py has the fields, values.py what values they may have, table.py the systems, group_table.py those without a
critic, settings.py fields as words of a command line, tokens.py what its texts are to a tokenizer, checks.py what only
a run's sizes and models can tell. algorithm.py resolves a dialect into the functions that a step calls, slots.py among
them what of a response counts, scores.py what becomes of its score, objectives.py the policy's loss.
"""

from engine.algo.advantages import ESTIMATORS, AdvantageEstimator, AdvantageInputs
from engine.algorithms.algorithm import Algorithm
from engine.algorithms.checks import check
from engine.algorithms.dialect import Dialect
from engine.algorithms.settings import parse_settings
from engine.algorithms.table import DIALECTS, NOTES, get_dialect
from engine.algorithms.tokens import end_token_id, token_id

__all__ = [
    "DIALECTS",
    "ESTIMATORS",
    "NOTES",
    "AdvantageEstimator",
    "AdvantageInputs",
    "Algorithm",
    "Dialect",
    "check",
    "end_token_id",
    "get_dialect",
    "parse_settings",
    "token_id",
]
