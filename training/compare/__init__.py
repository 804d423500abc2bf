"""Which of several models is better, and at what: all answer the same held-out prompts, with the same random numbers.

__main__.py     the program
flags.py        its flags
models.py       names, and where each model's folder is
answering.py    the engines: every model's responses, their scores and their KL to the first model
measures.py     what is measured of a model, and of a model beside the first
bootstrap.py    how far a mean over prompts is from a value, and whether chance alone would do that
report.py       the table and the JSON
page.py         the page
"""
