"""Merges an SFT model with models that were trained from it: adds the change of the weights, times a scale, to the SFT
model.

__main__.py  the program
flags.py     the program's flags
weights.py   reads and checks weights, computes SFT + scale * change one tensor at a time, and saves the result
callback.py  prints a run's merge command at its end
frontier.py  measures score, KL and variety at each scale on held-out prompts; makes the table
"""
