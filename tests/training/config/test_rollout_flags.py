"""The flags of rollouts: what goes together."""

import pytest

from engine.errors import UserError
from tests.training.config.command_lines import parse
from training.config.step3 import RLHFFlags


def asked(*words: str) -> RLHFFlags:
    return parse(*words, flags_class=RLHFFlags)


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["--vllm_tensor_parallel_size", "2"],
            "--vllm_tensor_parallel_size 2 needs --rollout_backend vllm. Give that",
        ),
        (
            ["--rollout_backend", "replica", "--vllm_sampler", "own"],
            "--vllm_sampler own needs --rollout_backend vllm.",
        ),
        (
            ["--rollout_backend", "vllm", "--decoding", "plain"],
            r"--decoding plain needs --rollout_backend auto\|replica\|zero3\. Give that",
        ),
        (
            ["--rollout_backend", "vllm", "--replicas_between_steps", "free"],
            "--replicas_between_steps free needs --rollout_backend auto",
        ),
        (["--rollout_backend", "vllm", "--vllm_tensor_parallel_size", "0"], "--vllm_tensor_parallel_size 0"),
    ],
)
def test_flags_of_other_backends_are_refused(words, message):
    with pytest.raises(UserError, match=message):
        asked(*words)


@pytest.mark.parametrize("backend, name", [("vllm", "vllm_tensor_parallel_size"), ("replica", "inference_tp_size")])
def test_groups_of_ranks_divide_those_of_a_node(monkeypatch, backend, name):
    monkeypatch.delenv("RANK", raising=False)  # other tests, which join a group in this process, leave one behind
    words = ["--rollout_backend", backend, f"--{name}", "4"]
    assert getattr(asked(*words), name) == 4
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_SIZE", "8")
    assert getattr(asked(*words), name) == 4
    monkeypatch.setenv("LOCAL_SIZE", "6")
    with pytest.raises(UserError, match=f"--{name} 4: the 6 ranks of a node .* divides 6"):
        asked(*words)
