"""Reads the data sets of `--data_path` and turns their records into token ids.

record   an entry of a file: any JSON value, and its place in the file for messages                       files.py
row      a dict of checked texts, made from one record by the form of a step; rows of step 3 keep the
         record's other columns, for reward functions
         record_forms.py
example  the token ids of a row to learn from: a text of step 1, a pair of step 2                      examples.py
prompt   the token ids of a prompt, to which step 3 draws responses                                    examples.py

A prompt passes through these files. sources.py finds the data set, row_selection.py chooses its records, and files.py
reads the records. record_forms.py turns each record into a row; if the record has messages, it renders them with the
chat template (chat.py). tokens.py turns the row's texts into token ids and cuts them to length. examples.py puts the
ids into a table, and token_cache.py keeps the table for later runs. order.py decides which rank gets which prompts in
which step.
"""
