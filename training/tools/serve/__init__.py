"""A service over HTTP: models answer prompts, and a reward model scores responses.

__main__.py  the program
flags.py     its flags
models.py    checks and loads the models and the reward model
decoder.py   decodes a model's responses in one batch that responses join and leave; turns tokens into text
service.py   the thread that decodes and scores for requests; limits how much is computed at a time
app.py       routes, forms of requests, answers to mistakes
server.py    connections, limits that apply before the app, the end of the service
page.html    the page: a prompt, and the models' responses side by side
"""
