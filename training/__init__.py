"""The programs of training. Those in training/tools run without its name, too: `python -m training.compare`."""

from pathlib import Path

__path__ = [*__path__, str(Path(__file__).with_name("tools"))]
