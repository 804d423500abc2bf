"""What step 1 says about its model before it trains."""

from types import SimpleNamespace

import pytest
from transformers import LlamaConfig, Qwen3NextConfig

from training.step1_sft import recurrent_lines


@pytest.mark.parametrize("config, warned", ((Qwen3NextConfig(), True), (LlamaConfig(), False)))
def test_a_model_that_later_steps_refuse_is_named(tmp_path, config, warned):
    config.save_pretrained(tmp_path)
    lines = recurrent_lines(SimpleNamespace(model_name_or_path=str(tmp_path), trust_remote_code=False))
    assert len(lines) == warned
    if warned:
        assert (
            lines[0].startswith("WARNING: step 3 will refuse this model") and f"{tmp_path} is a qwen3_next" in lines[0]
        )
