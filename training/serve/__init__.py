"""A service over HTTP: models answer side by side, a reward model scores.

__main__.py      the program
flags.py         what can be said to it
models.py        models and reward model, loaded and checked
drawing.py       tokens from logits: greedy, at a temperature, from the nucleus
response_text.py what a response says, as far as it is sure
generation.py    a response in the making
decoder.py       one model's responses, decoded side by side, coming and going
scoring.py       token ids to scores
worker.py        the thread that does all of this
service.py       what a request asks of the worker, and how much may be asked at once
connection.py    how long a client may say nothing, or read nothing
gate.py          what is looked at before a request is read: size, time, whether the service is ending
errors.py        clients' mistakes, as they are answered
requests.py      what clients may send
queries.py       OpenRLHF's queries as token ids
answers.py       what they are sent, in OpenAI's form
events.py        answers that are sent while they are drawn
app.py           which request leads where
server.py        from the first connection to the last
page.html        the page: a prompt, the models side by side
"""
