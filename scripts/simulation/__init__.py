"""The seconds of a PPO step by a formula: `python -m scripts.simulation.scaling` (docs/scaling.md)."""
