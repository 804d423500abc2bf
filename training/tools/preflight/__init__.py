"""Gathers facts of a run's nodes and compares them before anything large is loaded: in full by --preflight, and in
short at the start of each run on several hosts."""
