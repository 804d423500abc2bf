"""The training programs. A program in training/tools also runs under a shorter name: `python -m training.compare`."""

from pathlib import Path

__path__ = [*__path__, str(Path(__file__).with_name("tools"))]
