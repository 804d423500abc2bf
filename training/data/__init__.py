"""Data: from the data sets of `--data_path` to token ids.

record   an entry of a file: any JSON value, and its place in the file for messages                       files.py
row      a dict of checked texts, made of one record by the form of a step; rows of step 3 keep the
         record's other columns, for reward functions                                                     forms.py
example  the token ids of a row to learn from: a text of step 1, a pair of step 2                      examples.py
prompt   the token ids of a row to be answered                                                         examples.py

A prompt passes through these files: sources.py finds the data set, rows.py chooses its records, files.py reads them,
forms.py makes rows of them (of messages with the chat template, chat.py), tokens.py makes token ids of their texts and
cuts them to length. examples.py puts the ids into a table, and tables.py keeps it for later runs. order.py decides
which rank gets which prompts in which step.
"""
