"""Computes how much memory a run will take, from its flags and the models' configurations alone. A run uses `Compared`;
`training/memory_plan.py` is the program."""

from training.tools.memory.callback import Compared

__all__ = ["Compared"]
