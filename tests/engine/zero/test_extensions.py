"""Loading an extension of DeepSpeed's: one process at a time, past the mark of a killed build, and no other mark."""

import fcntl
import os
import signal
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from engine.errors import UserError
from engine.zero import extensions
from engine.zero.extensions import load_extension, load_for, refuse_missing
from engine.zero.partitioned_loading import partitioned_loading


@pytest.fixture
def build(tmp_path, monkeypatch):
    """A function that has an extension "own" built by the given function, under `tmp_path`."""
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))

    def builds(load):
        builders = {
            "Own": SimpleNamespace(NAME="own", is_compatible=lambda: True, load=load),
            "DoesNot": SimpleNamespace(NAME="does_not", is_compatible=lambda: False, load=lambda: pytest.fail()),
        }
        monkeypatch.setattr(get_accelerator(), "create_op_builder", builders.get)
        load_extension("Own")

    return builds


def mark(folder, name="own"):
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "lock").touch()
    return folder / name / "lock"


def is_free(folder) -> bool:
    with (folder / extensions.LOCK).open() as other:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_one_process_builds_at_a_time_and_others_marks_stay(build, tmp_path):
    others, seen = mark(tmp_path, "others"), []
    build(lambda: seen.append(is_free(tmp_path)))
    load_extension("DoesNot")
    load_extension("Unknown")
    assert seen == [False]
    assert is_free(tmp_path)
    assert others.exists()


def test_the_mark_of_a_build_that_was_killed_is_removed(build, tmp_path):
    others = mark(tmp_path, "others")

    def die():
        mark(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)

    if (pid := os.fork()) == 0:
        build(die)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert (tmp_path / "own" / "lock").exists()
    seen = []
    build(lambda: seen.append((tmp_path / "own" / "lock").exists()))
    assert seen == [False]
    assert others.exists()


def test_a_build_that_fails_leaves_no_word_of_it(build, tmp_path):
    with pytest.raises(RuntimeError, match="no compiler"):
        build(lambda: (_ for _ in ()).throw(RuntimeError("no compiler")))
    own = mark(tmp_path)  # of another program, later
    threading.Timer(0.5, own.unlink).start()
    seen = []
    build(lambda: seen.append(own.exists()))
    assert seen == [False]


def test_without_ninja_the_message_says_so_while_others_build(build, tmp_path, monkeypatch):
    def load():
        raise RuntimeError("Unable to JIT load the own op due to ninja not being installed.")

    monkeypatch.setenv("PATH", "/nowhere")
    mark(tmp_path)  # it would be waited for
    monkeypatch.setattr(fcntl, "flock", lambda *args: pytest.fail("the lock of a build is waited for"))
    with pytest.raises(UserError, match=r"^ninja is not found in PATH \(/nowhere\), and .* own .* pip install ninja"):
        build(load)
    seen = []
    build(lambda: seen.append("installed with DeepSpeed"))
    assert seen


def test_another_programs_build_of_the_same_is_waited_for(build, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(extensions, "TELL_AFTER", 0.1)
    own, ended = mark(tmp_path), []

    def end():
        ended.append(own.exists())
        own.unlink()

    threading.Timer(1.0, end).start()
    build(lambda: ended.append(own.exists()))
    assert ended == [True, False]
    assert f"waiting for {own}: another program builds" in capsys.readouterr().out


def test_another_programs_build_that_was_killed_is_not_waited_for(build, tmp_path):
    own, source = mark(tmp_path), tmp_path / "own" / "main.cpp"
    source.touch()
    for path in (own, source):
        os.utime(path, (time.time() - 3 * 3600, time.time() - 3 * 3600))
    with pytest.raises(UserError, match=rf"^{own} says .* extension own, .* for 180 minutes: .* Remove the file\.$"):
        build(pytest.fail)
    assert own.exists()
    source.touch()  # it lives: something is being written
    threading.Timer(0.5, own.unlink).start()
    seen = []
    build(lambda: seen.append(own.exists()))
    assert seen == [False]


def test_what_swaps_parameters_to_a_disk_is_built_before_deepspeed_does(monkeypatch):
    loaded = []
    monkeypatch.setattr(extensions, "load_extension", loaded.append)
    load_for({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    load_for({"zero_optimization": {"stage": 3, "offload_param": None}})
    load_for({})
    assert loaded == []
    monkeypatch.setattr("engine.zero.partitioned_loading.HfDeepSpeedConfig", lambda config: loaded.append("deepspeed"))
    with partitioned_loading({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}):
        pass
    assert loaded == ["PinMemoryBuilder", "AsyncIOBuilder", "deepspeed"]


NVME = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/ssd"}}}


@pytest.mark.parametrize("there", [True, False])
def test_swapping_to_a_disk_needs_libaio(monkeypatch, there):
    from deepspeed.accelerator import get_accelerator

    builder = SimpleNamespace(is_compatible=lambda: there)
    monkeypatch.setattr(get_accelerator(), "create_op_builder", {"AsyncIOBuilder": builder}.get)
    refuse_missing({"zero_optimization": {"stage": 3}}, "ds.json")
    if there:
        refuse_missing(NVME, "ds.json")
        return
    with pytest.raises(
        UserError, match=r"^ds\.json: .*offload_param\.device is 'nvme', but .* no libaio.*Install libaio-dev"
    ):
        refuse_missing(NVME, "ds.json")


def test_adam_in_host_memory_is_built_without_nvcc():
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    assert not isinstance(CUDA_Accelerator().create_op_builder("CPUAdamBuilder"), CUDAOpBuilder)


ALL = set(range(64))


@pytest.mark.parametrize(
    "ranks, threads",
    [
        ([("a", ALL)], 64),
        ([("a", ALL)] * 8 + [("b", ALL)] * 8, 8),
        ([("a", ALL)] * 6, 10),
        ([("a", set(range(8 * rank, 8 * rank + 8))) for rank in range(8)], 8),  # bound by the launcher
        ([("a", {0, 1})] * 4, 1),
    ],
)
def test_the_ranks_of_a_node_share_the_cores_that_they_may_use(monkeypatch, ranks, threads):
    monkeypatch.setattr(extensions.socket, "gethostname", lambda: ranks[0][0])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: ranks[0][1])
    monkeypatch.setattr(extensions.distributed, "all_gather_objects", lambda own: [own, *ranks[1:]])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    number = mock.Mock()
    monkeypatch.setattr(torch, "set_num_threads", number)
    extensions.share_cores.__wrapped__()
    number.assert_called_once_with(threads)


@pytest.mark.parametrize("given, torchrun, threads", [(None, 0, 2), ("1", 0, 7), ("1", 1, 2), ("7", 1, 7)])
def test_a_number_of_threads_that_the_user_gave_stays(monkeypatch, capsys, given, torchrun, threads):
    """7 threads before; 2 cores."""
    number = [7]
    monkeypatch.setattr(torch, "set_num_threads", number.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: number[-1])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(extensions.distributed, "all_gather_objects", lambda own: [own])
    for name, value in (("OMP_NUM_THREADS", given), ("TORCHELASTIC_RUN_ID", "none" if torchrun else None)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    extensions.share_cores.__wrapped__()
    assert number[-1] == threads
    assert capsys.readouterr().out == f"Adam in host memory: {threads} threads on each rank\n"
