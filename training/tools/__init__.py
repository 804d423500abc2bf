"""Programs beside the three steps. The steps import nothing of them, except for --preflight."""
