"""Collects facts about a run's nodes and compares them before anything large is loaded. --preflight compares all facts;
the start of each run on several hosts compares those that need no measuring."""
