"""The memory planner's command line: what it prints, what it ends with, and what it looks for."""

import json
import warnings

import pytest
from engine.memory.changes import Setting
from engine.memory.workload import Cluster
from training.runtime.memory_lines import change_lines

from engine.models.lora import LoraSpec
from tests.engine.memory.configurations import POLICY, SCORER, WORKLOAD, llama, spec_of
from training.memory_plan import main


@pytest.fixture(autouse=True)
def no_rank(monkeypatch):
    """The planner is a program of its own; other tests, which join a group in this process, leave a rank behind."""
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    path = llama(tmp_path_factory.mktemp("llama"))
    return [
        *("--actor_model_name_or_path", path, "--critic_model_name_or_path", path, "--dtype", "bf16"),
        *("--max_prompt_seq_len", "16", "--max_answer_seq_len", "8"),
        *("--per_device_generation_batch_size", "8", "--per_device_training_batch_size", "8"),
    ]


def bytes_of(words, capsys) -> dict:
    main([*words, "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_table_ends_with_whether_it_fits(words, capsys):
    assert main([*words, "--gpu", "a100-40g"]) == 0
    out = capsys.readouterr().out
    assert "1 x a100-40g, bf16" in out
    assert "train*" in out or "generate*" in out
    assert out.splitlines()[-1].startswith("fits: yes, ") and out.endswith(" of 42.5 GB\n")


def test_json_has_bytes(words, capsys):
    found = bytes_of(words, capsys)
    step = next(moment for moment in found["moments"] if moment["name"] == "actor's optimizer step")
    # 14 bytes a number of what trains, its gradients and these in float32, and the frozen models.
    assert step["gpu_bytes"] >= 20 * POLICY + 14 * SCORER + 2 * (POLICY + SCORER)
    assert found["needed_gpu_bytes"] == found["peak"]["gpu_bytes"] + found["fragments"] + found["reserved"]


def test_a_single_gpu_has_its_usual_stage(words, capsys):
    """Stages 0 and 1 need different buffers in the optimizer step, so a wrong stage shows."""

    def in_step(*given: str) -> int:
        moments = bytes_of([*words, *given], capsys)["moments"]
        return next(moment for moment in moments if moment["name"] == "actor's optimizer step")["gpu_bytes"]

    usual, stages = in_step(), ["--actor_zero_stage", "1", "--critic_zero_stage", "1"]
    assert usual == in_step(*stages) != in_step("--actor_zero_stage", "0", "--critic_zero_stage", "0")
    eight = ["--num_gpus", "8"]
    assert in_step(*eight) == in_step(*eight, "--actor_zero_stage", "0", "--critic_zero_stage", "0")
    assert in_step(*eight) != in_step(*eight, *stages)


@pytest.mark.slow
def test_what_does_not_fit_is_told_what_would(words, capsys):
    words = [*words, "--num_eval_prompts", "0"]  # whose keys and values would be most
    needed = bytes_of(words, capsys)["needed_gpu_bytes"]
    # Less than that by more than keys and values, which are given back without being asked.
    assert main([*words, "--gpu", str(needed - 400_000)]) == 1
    out = capsys.readouterr().out
    assert "fits: no" in out and "cheapest in speed first" in out and "then fits: yes" in out
    assert main([*words, "--gpu", "901MB"]) == 1
    assert "--search gpus" in capsys.readouterr().out


@pytest.mark.parametrize(
    "fields, told",
    [
        ({}, "or LoRA (--actor_lora_dim 16"),
        ({"actor_lora": LoraSpec(dim=4)}, "or --only_optimize_lora,"),
        ({"actor_lora": LoraSpec(dim=4, only=True)}, "or --share_trunk,"),
        ({"actor_lora": LoraSpec(dim=4, only=True), "share_trunk": True}, "more GPUs would (--search gpus)"),
    ],
)
def test_what_nothing_makes_fit_is_told_what_it_has_not_tried(fields, told, monkeypatch):
    monkeypatch.setattr("training.runtime.memory_lines.what_fits", lambda setting: None)
    (line,) = change_lines(Setting(spec_of("a/model", 0, **fields), WORKLOAD, Cluster(gpu=10**9)))
    assert told in line and line.count(" or ") == (0 if "share_trunk" in fields else 1)


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
    monkeypatch.setattr("engine.memory.changes.MOST_GPUS", 2)
    assert main([*words, "--gpu", "901MB", "--search", "gpus"]) == 1
    assert "does not fit on a thousand" in capsys.readouterr().out
    assert main([*words, "--gpu", "901MB", "--search", "batch"]) == 1
    assert "not even one row fits" in capsys.readouterr().out


def test_json_has_what_was_looked_for(words, capsys, monkeypatch):
    monkeypatch.setattr("engine.memory.changes.MOST_GPUS", 2)
    monkeypatch.setattr("training.memory_plan.largest", lambda fits: 3)
    batches = {"per_device_generation_batch_size": 3, "per_device_training_batch_size": 3}
    assert bytes_of([*words, "--search", "batch"], capsys)["largest_batch"] == batches
    assert bytes_of([*words, "--search", "gpus"], capsys)["fewest_gpus"] == {"num_gpus": 1, "num_nodes": 1}
    too_small = [*words, "--gpu", "901MB", "--search"]
    assert bytes_of([*too_small, "gpus"], capsys)["fewest_gpus"] is None
    monkeypatch.setattr("training.memory_plan.largest", lambda fits: 0)
    assert bytes_of([*too_small, "batch"], capsys)["largest_batch"] is None


def test_the_fewest_gpus_are_as_many_as_hold_the_actor_together(words, capsys):
    spread = ["--gpu", "a100-80g", "--search", "gpus", "--rollout_backend", "vllm", "--vllm_tensor_parallel_size", "4"]
    assert bytes_of([*words, *spread], capsys)["fewest_gpus"] == {"num_gpus": 4, "num_nodes": 1}


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
            "--vllm_tensor_parallel_size 3: the 8 ranks of a node cannot be divided into groups of 3",
        ),
        (
            ["--search", "gpus", "--rollout_backend", "replica", "--inference_tp_size", "16"],
            "--inference_tp_size 16: the 8 ranks of a node",
        ),
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
        ("2", "3", "2 does not divide the 3"),
    ):
        assert main([*words, *stages, "--inference_tp_size", asked, "--num_gpus", gpus]) == 2
        assert capsys.readouterr().err.startswith(f"error: --inference_tp_size {asked}: {reason}")
