"""One copy of a model on a machine: host memory over both ranks while it is loaded, and while it is saved."""

from scripts.harness.ranks import run_ranks
from tests.distributed.work_host_memory import make_llama

SLACK = 24e6  # pieces of files that are read, and what the libraries take for themselves


def test_a_model_is_in_host_memory_once_while_it_is_loaded_and_saved(tmp_path, folder):
    make_llama(tmp_path / "warm", width=16, layers=1, words=64)
    size = make_llama(tmp_path / "source", width=448, layers=12, words=64)
    given = {"path": str(tmp_path / "source"), "warm": str(tmp_path / "warm"), "output": str(tmp_path / "out")}
    given |= {"stage": 3, "settings": f"{folder}/stage3.json"}
    found = run_ranks("tests.distributed.work_host_memory:loaded_and_saved", **given)[0]
    assert 153e6 < size < 156e6 and abs(found["at_rest"] - size) < SLACK, (size, found)
    assert found["loading"] < 1.3 * size + SLACK, (size, found)  # all of it, its place for good included
    assert found["saving"] < 0.3 * size + SLACK, (size, found)
    for path in (tmp_path / "source").glob("*.safetensors"):
        assert (tmp_path / "out" / "model" / path.name).read_bytes() == path.read_bytes()
