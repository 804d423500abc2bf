"""Data: from what `--data_path` names to token ids.

record   what stands in a file, as it was read: any JSON value, with its place, which messages name      records.py
row      a dict of checked texts, made of one record by the form that a step reads; those of step 3
         keep the record's other columns, for reward functions                                           forms.py
example  a row as token ids to learn from: a text of step 1, a pair of step 2        sft_examples.py, pair_examples.py
prompt   a row as token ids to be answered                                                               prompts.py

A prompt passes six files on its way: sources.py finds the data set, rows.py chooses which of its records are read,
records.py reads them, forms.py makes rows of them, tokens.py gives the ids of their texts, prompts.py cuts these to
length. After that, cache.py keeps the ids for the next run, and order.py and feeds.py say which rank is given which
prompts in which step.
"""
