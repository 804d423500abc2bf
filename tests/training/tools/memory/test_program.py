"""The memory planner's command line: what it prints, what it ends with, and what it looks for."""

import re
import warnings

import pytest

from tests.training.tools.memory.configurations import llama
from training.tools.memory.__main__ import main
from training.tools.memory.callback import measured_line


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    path = llama(tmp_path_factory.mktemp("llama"))
    return [
        *("--actor_model_name_or_path", path, "--critic_model_name_or_path", path, "--dtype", "bf16"),
        *("--max_prompt_seq_len", "16", "--max_answer_seq_len", "8"),
        *("--per_device_generation_batch_size", "8", "--per_device_training_batch_size", "8"),
    ]


def test_the_table_ends_with_whether_it_fits(words, capsys):
    assert main([*words, "--gpu", "a100-40g"]) == 0
    out = capsys.readouterr().out
    assert "1 x a100-40g, bf16" in out
    assert "train*" in out or "generate*" in out
    assert out.splitlines()[-1].startswith("fits: yes, ") and out.endswith(" of 42.5 GB\n")


@pytest.mark.slow
def test_what_does_not_fit_is_told_what_would(words, capsys):
    words = [*words, "--num_eval_prompts", "0"]  # whose keys and values would be most
    assert main(words) == 0
    parts = re.search(r"needed of a GPU: (\S+) planned \+ (\S+) for fragments", capsys.readouterr().out)
    needed = 900_000_000 + round(1e9 * sum(map(float, parts.groups())))
    assert main([*words, "--gpu", str(needed - 400_000)]) == 1
    out = capsys.readouterr().out
    assert "fits: no" in out and "\nit fits with --" in out and "then fits: yes" in out
    assert main([*words, "--gpu", "901MB"]) == 1
    assert "--search gpus" in capsys.readouterr().out


@pytest.mark.slow
def test_one_trunk_is_planned_from_the_configuration_alone(words, capsys, tmp_path):
    """And no warning of a library's stands before the table."""
    (tmp_path / "rules.py").write_text("def score(prompts, responses):\n    return [0.0] * len(prompts)\n")
    critic = words.index("--critic_model_name_or_path")
    own = [*words[:critic], *words[critic + 2 :], "--reward_function", f"{tmp_path}/rules.py:score"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flags = "--share_trunk --only_optimize_lora --actor_lora_dim 4 --actor_gradient_checkpointing"
        assert main([*own, *flags.split()]) == 0
    assert "fits: yes" in capsys.readouterr().out


def test_what_is_looked_for_is_said(words, capsys, monkeypatch):
    monkeypatch.setattr("training.tools.memory.changes.MOST_GPUS", 2)
    for gpu, search, code, said in (
        ("a100-40g", "gpus", 0, "fewest GPUs: 1 x a100-40g"),
        ("901MB", "gpus", 1, "does not fit on a thousand"),
        ("a100-40g", "batch", 0, "largest batch: --per_device_generation_batch_size "),
        ("901MB", "batch", 1, "not even one row fits"),
    ):
        assert main([*words, "--gpu", gpu, "--search", search]) == code
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong, said",
    [
        (["--gpu", "a100"], "Did you mean a100-40g or a100-80g?"),
        (["--gpu", "h200x"], "Did you mean h200"),
        (["--gpu", "0"], "neither a GPU that is known"),
        (["--gpu", "24"], "--gpu 24 is 24 bytes, less than CUDA itself takes"),
        (["--host_memory", "much"], "--host_memory much"),
        (["--host_memory", "512"], "--host_memory 512: give a node's memory in bytes, with a unit"),
        (
            ["--actor_lora_dim", "4", "--actor_lora_module_name", "layrs."],
            "error: --actor_lora_module_name layrs.: --actor_model_name_or_path ",
        ),
        (["--num_gpus", "0"], "--num_gpus 0"),
        (
            ["--num_gpus", "8", "--rollout_backend", "vllm", "--vllm_tensor_parallel_size", "3"],
            "--vllm_tensor_parallel_size 3: a node has 8 ranks, which cannot be divided into groups of 3",
        ),
        (
            ["--search=gpus", "--rollout_backend=replica", "--actor_zero_stage=3", "--inference_tp_size=16"],
            "--inference_tp_size 16: a node has 8 ranks",
        ),
        (["--num_gpus", "6", "--sequence_parallel_size", "3"], "which 3 ranks cannot share. Give one of 1, 2, 4."),
        (["--gpu", "v100-32g"], "--dtype bf16 with --gpu v100-32g"),
        (["--max_answer_seq_len", "1000000"], "positions. Lower them."),
        (
            ["--actor_lora_dim", "4", "--only_optimize_lora", "--share_trunk", "--actor_zero_stage", "2", "--offload"],
            "--share_trunk with an offloaded optimizer",
        ),
        (["--actor_model_name_or_path", "no/such/model"], "no/such"),
    ],
)
def test_mistakes_are_one_message(words, wrong, said, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main([*words, *wrong]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and len(error.splitlines()) == 1


def test_ranks_that_cannot_hold_a_copy_together_are_refused(words, capsys):
    stages = [*("--actor_zero_stage", "3"), *("--critic_zero_stage", "3"), "--gpu", "a100-40g"]
    for asked, gpus, reason in (
        ("3", "6", "its 4 heads cannot be divided by 3"),
        ("2", "3", "2 does not divide the number of ranks"),
    ):
        assert main([*words, *stages, "--inference_tp_size", asked, "--num_gpus", gpus]) == 2
        assert capsys.readouterr().err.startswith(f"error: --inference_tp_size {asked}: {reason}")


def test_what_was_measured_stands_beside_what_was_planned():
    line = measured_line({"generate": 10**9, "train": 2 * 10**9}, {"train": 21 * 10**8})
    assert line == "memory, GB of rank 0 at each phase's peak (planned): generate 1.0, train 2.0 (2.1)"
