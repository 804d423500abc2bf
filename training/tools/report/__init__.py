"""Reports of runs as one HTML file: __main__.py is the program, page.py makes the page."""
