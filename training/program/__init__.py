"""The former name of `training.runtime`, for `python -m training.program.dry_run`."""
