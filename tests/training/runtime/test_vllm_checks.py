"""A run whose responses vLLM cannot draw is refused before data are read and models loaded."""

import re

import pytest

from engine.errors import UserError
from scripts.harness.models import make_causal_lm
from tests import fake_vllm
from tests.training.config.command_lines import parse
from training.config.step3 import RLHFFlags
from training.runtime.plan import check_files, check_vllm


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    """A model with 4 attention heads of 8 numbers."""
    return make_causal_lm(tmp_path_factory.mktemp("model"), "llama")


def asked(path: str, *words: str) -> RLHFFlags:
    return parse("--actor_model_name_or_path", path, "--rollout_backend", "vllm", *words, flags_class=RLHFFlags)


def test_a_missing_vllm_is_told_with_the_files(path, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.rollout.vllm_rollouts.metadata.version", fake_vllm.version(None))
    args = asked(path, "--output_dir", str(tmp_path / "out"), "--data_path", "no.jsonl", "--dtype", "fp32")
    with pytest.raises(UserError, match="vLLM is not installed here"):
        check_files(args, args.resolved_dialect()[0], None)


def test_heads_that_it_cannot_compute_or_divide_are_told(path, monkeypatch):
    monkeypatch.setattr("engine.rollout.vllm_rollouts.metadata.version", fake_vllm.version("0.32.1"))
    with pytest.raises(UserError, match=f"{re.escape(path)} has attention heads of 8 numbers; on CPUs"):
        check_vllm(asked(path))
    monkeypatch.delenv("RANK", raising=False)  # of a group that other tests joined
    with pytest.raises(UserError, match="--vllm_tensor_parallel_size 3: .* has 4 attention heads.* divides 4"):
        check_vllm(asked(path, "--vllm_tensor_parallel_size", "3"))
    check_vllm(asked(path, "--dry_run"))  # for other machines, it may be
