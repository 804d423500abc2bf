"""A run, or several beside each other, as one page to send to someone: __main__.py is the program, page.py the page."""
