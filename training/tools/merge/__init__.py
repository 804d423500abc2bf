"""Merges an SFT model with models trained from it, at any scale of the change; measures and saves the results.

__main__.py  the program
flags.py     its flags
weights.py   reads, checks, computes and saves SFT + scale * change, one tensor at a time
frontier.py  score, KL and variety at each scale, on held-out prompts; the table and the picture
"""
