"""torchrun's report of a failure says what ours said."""

from types import SimpleNamespace

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from engine.errors import SharedError
from training.program import watch
from training.program.error_file import ENVIRONMENT, write_error_file
from training.program.member import Member
from training.program.roll_call import Verdict
from training.program.startup import _told


def report_of(file) -> str:
    """As torchrun prints it for rank 0, which left this file and ended with exit code 2."""
    failure = ProcessFailure(local_rank=0, pid=4, exitcode=2, error_file=str(file))
    return str(ChildFailedError("step3_rlhf.py", {0: failure}))


def test_the_report_ends_with_our_message(monkeypatch, tmp_path, capsys):
    file = tmp_path / "error.json"
    monkeypatch.setenv(ENVIRONMENT, str(file))
    assert "To enable traceback" in report_of(file)
    assert _told(SharedError("--max_steps -3: must be at least 1.")) == 2
    assert capsys.readouterr().err == "error: --max_steps -3: must be at least 1.\n"
    assert "  traceback : error: --max_steps -3: must be at least 1.\n" in report_of(file)
    assert "To enable traceback" not in report_of(file)


def test_the_report_has_the_reason_of_all_and_not_what_came_of_it_here(monkeypatch, tmp_path):
    file, ended = tmp_path / "error.json", []
    monkeypatch.setenv(ENVIRONMENT, str(file))
    monkeypatch.setattr(watch, "leave_now", ended.append)
    write_error_file("Traceback: connection closed by peer")
    watch.conclude(Verdict("error: on gpu2: there is no folder X.", code=2), SimpleNamespace(rank=0))
    assert ended == [2] and "  traceback : error: on gpu2: there is no folder X.\n" in report_of(file)
    member = Member.__new__(Member)  # of a rank that has lost rank 0
    member.rank = 1
    member._conclude("rank 0 is cut off: the run ends.")
    assert "  traceback : rank 0 is cut off: the run ends.\n" in report_of(file)


def test_without_torchrun_and_where_nothing_can_be_written(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    write_error_file("a")
    monkeypatch.setenv(ENVIRONMENT, "")  # as where it keeps no logs
    write_error_file("a")
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "absent" / "error.json"))
    write_error_file("a")
    assert list(tmp_path.iterdir()) == []
