"""Keeps `python -m training.restarts.export` working, the former name of training/checkpoints/export.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("training.checkpoints.export", run_name="__main__")
