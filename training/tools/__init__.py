"""Further programs. The three steps do not import them, except for --preflight."""
