"""What a node finds of itself, and of what a run reads."""

import errno
import platform
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from engine.errors import UserError
from scripts.harness import free_port
from scripts.harness.programs import Tiny
from tests.reward_server import serving
from training.config.parsing import parse_flags
from training.config.step3 import RLHFFlags
from training.tools.preflight import exchange, facts
from training.tools.preflight.facts import Fact, bytes_in_short, content, disk, inputs_of, looked_at


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_infiniband_counts_before_interfaces_and_only_what_is_connected(tmp_path):
    write(tmp_path / "net/eth0/speed", "25000\n")
    write(tmp_path / "net/eth0/device/vendor", "")
    write(tmp_path / "net/veth1/speed", "100000\n")  # which is no card
    write(tmp_path / "net/eth1/speed", "-1\n")  # which is down
    write(tmp_path / "net/eth1/device/vendor", "")
    assert facts.network_cards(tmp_path) == "eth0 25 Gb/s"
    for card, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN"), ("mlx5_2", "4: ACTIVE")):
        write(tmp_path / f"infiniband/{card}/ports/1/state", state)
        write(tmp_path / f"infiniband/{card}/ports/1/rate", "200 Gb/sec (4X HDR)")
    assert facts.network_cards(tmp_path) == "2 x 200 Gb/s InfiniBand"
    assert facts.network_cards(tmp_path / "none") == ""


def test_versions_have_to_be_the_same_of_python_the_first_two_numbers():
    found = facts.all_versions()
    assert found["python"].same == ".".join(platform.python_version_tuple()[:2])
    assert found["python"].shown == platform.python_version()
    assert found["torch"].same == found["torch"].shown == torch.__version__
    assert all(fact.same and not fact.problem and fact.warning == (row == "driver") for row, fact in found.items())


def test_a_disk_is_written_to_and_nothing_is_left(tmp_path):
    found = disk(tmp_path / "not" / "yet", "output", least=0)
    assert found.amount > 0 and not found.problem
    assert list(tmp_path.iterdir()) == []
    short = disk(tmp_path, "output", 1e18, "; models take 1 EB", short_is_fault=True)
    assert short.problem.endswith(f" free at {tmp_path} (output); models take 1 EB") and not short.warning
    assert disk(tmp_path, "tokenised data", 1e18).warning
    with mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        full, cache = disk(tmp_path, "output"), disk(tmp_path, "models of the Hub", optional=True)
    assert full.problem == f"nothing can be written to {tmp_path} (output): No space left on device: free some space"
    assert (full.shown, full.warning, cache.warning) == ("No space left on device", False, True)


@pytest.mark.parametrize(
    ("cards", "ranks", "problem", "memory"),
    [
        ([80, 80], 2, "", ""),
        ([80], 2, "torch sees 1 GPUs for 2 ranks", "torch cannot use GPU 1: invalid device ordinal"),
        ([80, None], 2, "", "torch cannot use GPU 1: no kernel image"),
        ([None, 55], 2, "", "torch cannot use GPU 0: no kernel image"),  # worse than memory that is taken
        ([80, 55], 2, "", "25 GB of 80 GB of GPU 1 are taken: look who runs there"),
        ([80, 75], 2, "", ""),
    ],
)
def test_gpus_are_counted_tried_and_asked_for_their_memory(monkeypatch, cards, ranks, problem, memory):
    """cards: the free memory of each in GB, None for one with which torch cannot compute."""

    def ask(index: int) -> tuple[int, int]:
        if index >= len(cards):
            raise RuntimeError("invalid device ordinal")
        if cards[index] is None:
            raise RuntimeError("no kernel image\nmore of it")
        return cards[index] * 10**9, 80 * 10**9

    card = SimpleNamespace(name="NVIDIA A100", major=8, minor=0)
    monkeypatch.setattr(facts, "on_gpu", lambda: True)
    monkeypatch.setattr(exchange, "on_gpu", lambda: True)
    monkeypatch.setattr(facts.torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(facts.torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(facts.torch.cuda, "mem_get_info", ask)
    ones = facts.torch.ones
    monkeypatch.setattr(facts.torch, "ones", lambda *shape, device: ones(*shape))
    found = facts.gpus(ranks)
    assert found["GPUs"].shown == found["GPUs"].same == f"{len(cards)} x NVIDIA A100 (8.0)"
    assert found["GPUs for ranks"].problem == problem
    posted = {}
    for rank in range(ranks):
        monkeypatch.setattr(exchange.distributed, "local_rank", lambda rank=rank: rank)
        monkeypatch.setattr(exchange, "facts_of_node", lambda args, thorough: found)
        posted[rank] = exchange.facts_of_rank(None)
    (node,) = exchange.nodes_of(posted)
    assert node.facts["GPU memory"].problem == memory
    assert "gpu" not in exchange.facts_of_rank(None, thorough=False)


def test_a_node_without_ninja(monkeypatch):
    monkeypatch.setattr(facts, "version_of", lambda program: "")
    args = SimpleNamespace(as_dict=lambda: {"offload": False})
    on_cpu = facts.tools(args)
    assert on_cpu["ninja"].problem.startswith("no ninja") and not on_cpu["ninja"].warning
    assert on_cpu["c++"].problem.startswith("no C++ compiler") and on_cpu["c++"].warning
    monkeypatch.setattr(facts, "on_gpu", lambda: True)
    assert facts.tools(args)["ninja"].warning
    assert not facts.tools(SimpleNamespace(as_dict=lambda: {"offload": True}))["ninja"].warning


def test_variables_of_libraries_are_told_without_secrets():
    given = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_x", "GLOO_SOCKET_IFNAME": "eth0", "HOME": "/root"}
    found = facts.variables(given)
    assert {name: (fact.shown, fact.same) for name, fact in found.items()} == {
        "GLOO_SOCKET_IFNAME": ("eth0", None),  # interfaces may well be called otherwise
        "HF_TOKEN": ("set", "set"),
        "NCCL_DEBUG": ("INFO", "INFO"),
    }


def test_programs_that_cannot_be_run_have_no_version(tmp_path):
    program = write(tmp_path / "ninja", "#!/bin/sh\necho ninja 1.13.0\n")
    assert facts.version_of(str(program)) == ""  # not executable
    program.chmod(0o755)
    assert facts.version_of(str(program)) == "1.13.0"
    assert facts.version_of(str(tmp_path / "none")) == ""


def test_data_are_the_same_where_their_bytes_are(tmp_path):
    one, two = (write(tmp_path / name / "prompts.jsonl", '{"prompt": "a"}\n') for name in ("one", "two"))
    assert content(one) == content(two)
    assert content(one.parent) == content(two.parent) != content(one)
    two.write_text('{"prompt": "b"}\n')
    assert content(one) != content(two)
    with pytest.raises(UserError, match="there is no"):
        content(tmp_path / "three")


def test_all_that_flags_name_is_looked_at_and_a_run_needs_room(tmp_path):
    tiny = Tiny(tmp_path)
    words = [f"--{name}={value}" for name, value in tiny.flags(3, output_dir=tmp_path / "out").items()]
    function = write(tmp_path / "rewards.py", "def score(prompts, responses): ...")
    args = parse_flags(RLHFFlags, [*words, f"--reward_function={function}:score"], "")
    found = inputs_of(args)
    assert set(found) == {
        f"--actor_model_name_or_path {tmp_path / 'sft'}",
        f"--critic_model_name_or_path {tmp_path / 'reward'}",
        f"--data_path {tmp_path / 'prompts.jsonl'}",
        f"--reward_function {function}:score",
    }
    assert all(len(one.shown) == 8 and one.same.startswith(one.shown) and not one.problem for one in found.values())
    args.dtype = "fp32"
    files = [tmp_path / name / "model.safetensors" for name in ("sft", "reward")]
    assert facts.room_of(args) > sum(file.stat().st_size for file in files)
    (tmp_path / "sft" / "model.safetensors").unlink()
    assert "model.safetensors" in looked_at("actor_model_name_or_path", str(tmp_path / "sft")).problem
    none = tmp_path / "none.jsonl"
    assert looked_at("data_path", str(none)).problem == f"--data_path {none}: there is no {none}"


def test_a_reward_server_can_be_connected_to(monkeypatch):
    with serving() as server:
        assert not looked_at("reward_url", server.url).problem
        monkeypatch.setenv("http_proxy", server.url)
        monkeypatch.delenv("no_proxy", raising=False)
        assert not looked_at("reward_url", "http://rewards.invalid/score").problem  # the proxy is there
    url = f"http://127.0.0.1:{free_port()}/score"
    assert "refused" in looked_at("reward_url", url).problem


@pytest.mark.parametrize("wrong", [{"shown": 5}, {"shown": "a", "amount": "b"}, {"shown": "a", "same": ["b"]}])
def test_what_another_process_has_written_is_a_fact_or_refused(wrong):
    with pytest.raises(TypeError, match="is no fact"):
        Fact(**wrong)


def test_bytes_in_words():
    sizes = {999: "999 B", 1500: "1.5 kB", 64e6: "64 MB", 1.5e9: "1.5 GB", 2e12: "2.0 TB"}
    assert {size: bytes_in_short(size) for size in sizes} == sizes


def test_looking_at_nodes_and_at_flags_are_two_things(tmp_path):
    words = [f"--{name}={value}" for name, value in Tiny(tmp_path).flags(3, output_dir=tmp_path / "out").items()]
    with pytest.raises(UserError, match="--preflight looks at the nodes of a run, and --dry_run at its flags"):
        parse_flags(RLHFFlags, [*words, "--preflight", "--dry_run"], "")
