"""The former name of `training.checkpoints`, for `python -m training.restarts.export`."""
