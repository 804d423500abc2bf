"""Pages that are one file: style, scripts and data stand in it, and nothing is fetched."""
