"""Further programs beside the three training steps. The steps import only tools/preflight."""
