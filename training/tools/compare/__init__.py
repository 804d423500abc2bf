"""Which of several models is better, and at what: all answer the same held-out prompts, with the same random numbers.

__main__.py  the program: every model's responses, their scores and their KL to the first model
flags.py     its flags
measures.py  measurements of one model, and of a model compared with the first, with their significance
report.py    the table, the JSON and the page
"""
