"""A run, or several beside each other, as one page to send to someone.

__main__.py     the program
runs.py         what a run's folder holds
page.py         the page
"""
