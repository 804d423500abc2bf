"""What the nodes of a run are, gathered and compared before anything large is loaded: --preflight, and in short at the
start of each run on several hosts."""
