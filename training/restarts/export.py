"""`python -m training.restarts.export` goes on working; the program is training/checkpoints/export.py."""

import sys

from training.checkpoints.export import main

if __name__ == "__main__":
    sys.exit(main())
