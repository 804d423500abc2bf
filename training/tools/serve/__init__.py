"""A service over HTTP: models answer a prompt side by side, and a reward model scores responses.

__main__.py  the program
flags.py     the program's flags
models.py    checks and loads models; draws responses and computes scores
requests.py  the forms of requests
server.py    connections and their limits; answers
page.html    the web page: a prompt, and the models' responses side by side
"""
