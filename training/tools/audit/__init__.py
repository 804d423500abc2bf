"""Audits rewards before PPO learns from them: an SFT model's best responses by each of them.

__main__.py  the program: draws the responses, and scores them by all rewards
flags.py     the program's flags
report.py    the tables, the JSON and the page
"""
