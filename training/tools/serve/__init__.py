"""A service over HTTP: models answer side by side, a reward model scores.

__main__.py  the program
flags.py     what can be said to it
models.py    models and reward model, loaded and checked
decoder.py   one model's responses, decoded side by side, coming and going: tokens drawn, text told
service.py   what a request asks of the thread that decodes and scores, and how much may be asked at once
app.py       which request leads where, what clients may send, how mistakes are answered
server.py    connections, limits that stand before the app, and how the service ends
page.html    the page: a prompt, the models side by side
"""
