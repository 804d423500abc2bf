"""Callbacks that add what is no number, and that fail where a model is written."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.errors import RunStopped
from training.runtime import stopping
from training.runtime.callbacks import Callback, numbers
from training.runtime.loop import Run


def test_metrics_of_callbacks_are_written_as_numbers():
    found = numbers({"own/tensor": torch.tensor(0.5), "own/count": 3})
    assert found == {"own/tensor": 0.5, "own/count": 3.0} and {type(value) for value in found.values()} == {float}


@pytest.mark.parametrize("value", ["fast", None, torch.ones(2)])
def test_a_metric_that_is_not_a_number_is_named(value):
    with pytest.raises(RunStopped, match="the metric own/speed is .*, which is not a number"):
        numbers({"own/speed": value})


@pytest.mark.parametrize("error", [ValueError("no card"), OSError(28, "No space left on device"), SystemExit(3)])
def test_a_callback_that_fails_spoils_no_model_and_ends_the_run_at_its_end(error, monkeypatch, capsys):
    class Failing(Callback):
        def saved(self, name, folder, run):
            raise error

    monkeypatch.setattr(stopping, "_noted", {})
    Run.written(SimpleNamespace(callbacks=[Failing()]), "actor", Path("actor.partial"))
    assert "Traceback" in capsys.readouterr().err
    with pytest.raises(RunStopped, match="what callbacks add to the model actor"):
        stopping.check_all_written()
