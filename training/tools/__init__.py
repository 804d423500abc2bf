"""Programs beside the three steps: nothing of these imports them, but for --preflight of a run."""
