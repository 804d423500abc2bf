"""A value that a flag once had is answered with one sentence on what does its work, and is none of its choices."""

import pytest

from engine.errors import UserError
from engine.rollout import ROLLOUT_BACKENDS
from training.config.parsing import parse_flags
from training.config.step3 import RLHFFlags


def refusal(*words: str) -> str:
    required = ["--actor_model_name_or_path", "a", "--critic_model_name_or_path", "r", "--data_path", "d"]
    with pytest.raises(UserError) as caught:
        parse_flags(RLHFFlags, [*required, "--output_dir", "out", *words], "")
    return str(caught.value)


def test_the_hybrid_engine(tmp_path):
    assert "hybrid" not in ROLLOUT_BACKENDS
    message = refusal("--rollout_backend", "hybrid")
    assert message.startswith("--rollout_backend hybrid: DeepSpeed's hybrid engine ")
    assert "auto or replica" in message and "\n" not in message
    (tmp_path / "flags.yaml").write_text("rollout_backend: hybrid\n")
    assert refusal("--config", str(tmp_path / "flags.yaml")) == f"{tmp_path}/flags.yaml, key rollout_backend: {message}"


def test_a_value_that_never_was_is_answered_with_the_choices():
    message = refusal("--rollout_backend", "sglang")
    assert "hybrid" not in message and all(name in message for name in ROLLOUT_BACKENDS)
