"""Compares several models: all of them answer the same held-out prompts, with the same random numbers.

__main__.py  the program: draws every model's responses, and computes their scores and their KL to the first model
flags.py     the program's flags
measures.py  measurements of one model, and of a model compared with the first, with their significance
report.py    the table, the JSON and the page
"""
