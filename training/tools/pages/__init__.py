"""HTML pages in one file: style, scripts and data are part of it, and nothing is fetched."""
