"""What cannot be written is told once, kept where it can be, and makes the run's end a failure."""

import contextlib
import resource

import pytest

from engine.errors import RunStopped
from scripts.harness.programs import metric_lines
from training.reporting import sinks
from training.reporting.sinks import JsonlSink, MetricWriter
from training.runtime import stopping
from training.runtime.stopping import check_all_written


@pytest.fixture(autouse=True)
def nothing_noted():
    stopping.forget_unwritten()
    yield
    stopping.forget_unwritten()


@contextlib.contextmanager
def files_of_at_most(size: int):
    """The system refuses to let a file of this process grow beyond `size` bytes, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_that_find_no_space_are_kept_and_written_later(tmp_path, capsys):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(1, 4, {"loss": 1.0})
    first = (tmp_path / "metrics.jsonl").read_text()
    with files_of_at_most(len(first) + 10):  # the next line is begun, and cannot be ended
        sink.log(2, 8, {"loss": 2.0})
        sink.log(3, 12, {"loss": 3.0})
    assert (tmp_path / "metrics.jsonl").read_text() == first
    assert capsys.readouterr().err.count("metrics.jsonl cannot be written") == 1
    with pytest.raises(RunStopped, match=r"not all of it is on the disk: .*metrics\.jsonl \(File too large\)"):
        check_all_written()
    sink.log(4, 16, {"loss": 4.0})
    sink.close()
    assert [(line["step"], line["loss"]) for line in metric_lines(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert "nothing of it is missing" in capsys.readouterr().err
    check_all_written()


@pytest.mark.parametrize("deleted", [False, True], ids=["moved", "deleted"])
def test_a_folder_that_goes_away_is_made_again_with_all_lines(deleted, tmp_path, capfd):
    out = tmp_path / "out"
    sink = JsonlSink(out / "metrics.jsonl")
    sink.log(1, 4, {"loss": 1.0})
    if deleted:
        (out / "metrics.jsonl").unlink()
        out.rmdir()
    else:
        out.rename(tmp_path / "moved")
    sink.log(2, 8, {"loss": 2.0})
    sink.close()
    assert [line["step"] for line in metric_lines(out)] == [1, 2]
    assert (
        f"WARNING: {out} was moved or deleted. The run goes on in a new folder of this name." in capfd.readouterr().err
    )
    if not deleted:
        assert [line["step"] for line in metric_lines(tmp_path / "moved")] == [1]
    check_all_written()


def test_a_sink_that_fails_is_told_once_and_left_out(tmp_path, capfd, monkeypatch):
    class Sink:
        calls = 0

        def __init__(self, folder, **how):
            pass

        def log(self, step, samples, metrics):
            Sink.calls += 1
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sinks, "TensorBoardSink", Sink)
    writer = MetricWriter(tmp_path, total_steps=2)
    writer.log(1, 4, {})
    writer.log(2, 8, {})
    writer.close()
    assert Sink.calls == 1
    warning = f"{tmp_path}/tensorboard cannot be written (No space left on device: free some space). The run goes on."
    assert capfd.readouterr().err.count(f"WARNING: {warning}\n") == 1
    with pytest.raises(RunStopped):
        check_all_written()
