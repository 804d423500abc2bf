"""Collects facts about a run's nodes and compares them before anything large is loaded. --preflight compares all facts.
At the start of each run on several hosts, only those facts are compared that need no measuring."""
