"""Further programs beside the three training steps. The steps import none of them."""
