"""What step 1 says about its model before it trains."""

from types import SimpleNamespace

import pytest
from transformers import LlamaConfig, MiniMaxConfig, Qwen3NextConfig

from training.step1_sft import decoding_lines


@pytest.mark.parametrize(
    "config, warned", ((MiniMaxConfig(), True), (Qwen3NextConfig(), False), (LlamaConfig(), False))
)
def test_a_model_that_later_steps_refuse_is_named(tmp_path, config, warned):
    config.save_pretrained(tmp_path)
    lines = decoding_lines(SimpleNamespace(model_name_or_path=str(tmp_path), trust_remote_code=False))
    assert len(lines) == warned
    if warned:
        assert lines[0].startswith("WARNING: step 3 can draw with vLLM only") and f"{tmp_path} is a minimax" in lines[0]
