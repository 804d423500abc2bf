"""Keeps `python -m training.program.dry_run` working, the former name of training/runtime/dry_run.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("training.runtime.dry_run", run_name="__main__")
