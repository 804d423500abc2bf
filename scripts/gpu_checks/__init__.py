"""What no CPU can try, in one command: scripts/check_gpu.sh.

A check is a name, a time limit and a function of a `Trial`, to which it says what it found. Each runs in a process of
its own. `__main__.py` lists them all, the most important first.
"""
