"""Models between and beyond an SFT model and what was trained from it: merged, scaled, measured, saved.

__main__.py     the program
weights.py      SFT + scale * change, a tensor at a time
same_kind.py    whether models can be merged
frontier.py     score, KL and variety at each scale, on held-out prompts
report.py       the table, the picture and the JSON of what was measured
saving.py       the chosen model as a folder
"""
