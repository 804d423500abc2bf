"""Models between and beyond an SFT model and what was trained from it: merged, scaled, measured, saved.

__main__.py  the program
flags.py     its flags
weights.py   SFT + scale * change, a tensor at a time: read, checked, saved as a folder
frontier.py  score, KL and variety at each scale, on held-out prompts; the table and the picture
"""
