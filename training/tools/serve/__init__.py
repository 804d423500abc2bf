"""A service over HTTP: models answer prompts, and a reward model scores responses.

__main__.py  the program
flags.py     the program's flags
models.py    checks and loads the models and the reward model
decoder.py   decodes a model's responses in one batch, which responses join and leave at any time; makes text of tokens
service.py   the thread that decodes and scores for requests; limits how much is computed at a time
app.py       the routes, the forms of requests, and the answers to wrong requests
server.py    the connections, the limits that apply before the app gets a request, and the end of the service
page.html    the web page: a prompt, and the models' responses side by side
"""
