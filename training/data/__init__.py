"""Data: from what `--data_path` names to token ids.

record   an entry of a file, as it was read: any JSON value, with its place, which messages name          files.py
row      a dict of checked texts, made of one record by the form that a step reads; those of step 3
         keep the record's other columns, for reward functions                                            forms.py
example  a row as token ids to learn from: a text of step 1, a pair of step 2                          examples.py
prompt   a row as token ids to be answered                                                             examples.py

A prompt passes through these files: sources.py finds the data set, rows.py chooses which of its records are read,
files.py reads them, forms.py makes rows of them (of messages by the chat template, chat.py), tokens.py gives the ids of
their texts and cuts them to length. Then examples.py puts the ids into a table, which tables.py keeps for the next run,
and order.py says which rank is given which prompts in which step.
"""
