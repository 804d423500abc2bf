"""The programs of training. Those in training/tools also run without "tools": `python -m training.compare`."""

from pathlib import Path

__path__ = [*__path__, str(Path(__file__).with_name("tools"))]
