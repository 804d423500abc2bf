"""What a node can say of itself."""

import errno
from pathlib import Path
from unittest import mock

import pytest

from engine.errors import UserError
from scripts.harness.programs import Tiny
from training.flags.parsing import parse_flags
from training.flags.rlhf_arguments import RLHFFlags
from training.preflight import gathering, launched
from training.preflight.inputs import content, inputs_of, looked_at
from training.preflight.node import Disk


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
    assert gathering.network_cards(tmp_path) == ("eth0 25 Gb/s", 25e9 / 8)
    for card, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN"), ("mlx5_2", "4: ACTIVE")):
        write(tmp_path / f"infiniband/{card}/ports/1/state", state)
        write(tmp_path / f"infiniband/{card}/ports/1/rate", "200 Gb/sec (4X HDR)")
    assert gathering.network_cards(tmp_path) == ("2 x 200 Gb/s InfiniBand", 400e9 / 8)
    assert gathering.network_cards(tmp_path / "none") == ("", 0.0)


def test_a_disk_is_written_to_and_nothing_is_left(tmp_path):
    found = gathering.disk(tmp_path / "not" / "yet")
    assert found.path == str(tmp_path / "not" / "yet")
    assert found.free > 0
    assert not found.problem
    assert list(tmp_path.iterdir()) == []
    full = mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with full:
        told = gathering.disk(tmp_path)
        assert told == Disk(path=str(tmp_path), free=0, problem="No space left on device: free some space")
        assert not gathering.disk(tmp_path, thorough=False).problem


def test_variables_of_libraries_are_told_without_secrets():
    given = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_x", "GLOO_SOCKET_IFNAME": "eth0", "HOME": "/root"}
    told = {"GLOO_SOCKET_IFNAME": "eth0", "HF_TOKEN": "set", "NCCL_DEBUG": "INFO"}
    assert gathering.libraries_variables(given) == told


def test_programs_that_cannot_be_run_have_no_version(tmp_path):
    program = write(tmp_path / "ninja", "#!/bin/sh\necho ninja 1.13.0\n")
    assert gathering.version_of(str(program)) == ""  # not executable
    program.chmod(0o755)
    assert gathering.version_of(str(program)) == "1.13.0"
    assert gathering.version_of(str(tmp_path / "none")) == ""


def test_data_are_the_same_where_their_bytes_are(tmp_path):
    one, two = (write(tmp_path / name / "prompts.jsonl", '{"prompt": "a"}\n') for name in ("one", "two"))
    assert content(one) == content(two)
    assert content(one.parent) == content(two.parent) != content(one)
    two.write_text('{"prompt": "b"}\n')
    assert content(one) != content(two)
    with pytest.raises(UserError, match="there is no"):
        content(tmp_path / "three")


def test_all_that_flags_name_is_looked_at(tmp_path):
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
    assert all(one.content and not one.problem for one in found.values())
    (tmp_path / "sft" / "model.safetensors").unlink()
    assert "model.safetensors" in looked_at("actor_model_name_or_path", str(tmp_path / "sft")).problem
    assert looked_at("data_path", str(tmp_path / "none.jsonl")).problem == f"there is no {tmp_path / 'none.jsonl'}"


def test_hosts_of_ranks_are_those_that_deepspeed_tells_its_launchers():
    # {"gpu01": [0, 1], "gpu02": [0, 3]}
    words = [
        "python",
        "-m",
        "deepspeed.launcher.launch",
        "--world_info=eyJncHUwMSI6IFswLCAxXSwgImdwdTAyIjogWzAsIDNdfQ==",
    ]
    assert launched.hosts_by_rank(4, [["bash"], words]) == {0: "gpu01", 1: "gpu01", 2: "gpu02", 3: "gpu02"}
    assert launched.hosts_by_rank(2, [["bash"]]) == {0: "", 1: ""}
    assert launched.hosts_by_rank(1, [["--world_info=?"]]) == {0: ""}


def test_looking_at_nodes_and_at_flags_are_two_things(tmp_path):
    words = [f"--{name}={value}" for name, value in Tiny(tmp_path).flags(3, output_dir=tmp_path / "out").items()]
    with pytest.raises(UserError, match="--preflight looks at the nodes of a run, and --dry_run at its flags"):
        parse_flags(RLHFFlags, [*words, "--preflight", "--dry_run"], "")
