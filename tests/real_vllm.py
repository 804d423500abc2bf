"""A program: responses by vLLM's CPU build, beside those of this project's loop. It prints one line of JSON.

python -m tests.real_vllm first|second keyed|own FOLDER

vLLM reads prompts in parts and has memory for two of four rows, so it stops rows and begins them again. It runs with
its first model runner, or with the second one, whose Triton kernels the interpreter then executes.
"""

import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

RUNNER, SAMPLER, FOLDER = sys.argv[1:]
os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "01"[RUNNER == "second"], "TRITON_INTERPRET": "01"[RUNNER == "second"]}

import torch  # noqa: E402  # the variables come first
import triton.backends  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from engine.models.loading import load_policy  # noqa: E402
from engine.rollout import ReplicaRollouts  # noqa: E402
from engine.rollout.vllm_rollouts import VLLMRollouts  # noqa: E402
from engine.zero.communication import init  # noqa: E402
from scripts.harness.models import VOCABULARY, make_tokenizer, save_random  # noqa: E402
from tests.engine.rollout.test_decode import BATCH, SAMPLING  # noqa: E402
from tests.engine.rollout.test_vllm import update  # noqa: E402

BLOCK = 32 * 2 * 2 * 2 * 32 * 4  # bytes of 32 slots: layers, keys and values, heads, their size, float32
HOW = replace(SAMPLING, max_new_tokens=40, stop_token_ids=(), logprob_temperature=1.0, with_entropy=True)


def let_the_second_runner_start() -> None:
    """vLLM needs a CPU backend of Triton for it, which the interpreter is. A stream of CUDA is made but not used."""
    triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    from vllm.v1.worker import cpu_model_runner
    from vllm.v1.worker.cpu.model_runner import CPUModelRunner

    start = CPUModelRunner.__init__

    def started(self, *args, **kwargs) -> None:
        cpu_model_runner._set_torch_accelerator_to_noop()
        with cpu_model_runner._torch_cuda_wrapper():
            start(self, *args, **kwargs)

    CPUModelRunner.__init__ = started


def main() -> None:
    if RUNNER == "second":
        let_the_second_runner_start()
    import vllm

    init()
    shape = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}  # of 32: vLLM's CPU kernels know none that are smaller
    save_random(LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape, **heads)), FOLDER)
    actor = SimpleNamespace(module=load_policy(FOLDER, torch.float32).eval(), stage=0, version=0, role="actor")
    # On CPUs the first runner cannot read prompts in parts while its own sampler draws: it sets a generator's offset.
    small = {"block_size": 32, "max_num_batched_tokens": 256 if (RUNNER, SAMPLER) == ("first", "own") else 6}
    preempted: list[int] = []
    make, vllm.LLM = vllm.LLM, lambda **how: make(**how, **small)
    rollouts = VLLMRollouts(
        actor, make_tokenizer(), rows_at_once=4, row_length=64, cache_bytes=6 * BLOCK, sampler=SAMPLER
    )
    core = rollouts._llm.llm_engine.engine_core.engine_core
    preempt = core.scheduler._preempt_request
    core.scheduler._preempt_request = lambda *args, **how: (preempted.append(1), preempt(*args, **how))
    same, gaps = [], []
    for _ in range(2):
        found, ours = rollouts.generate(BATCH, HOW), ReplicaRollouts(actor, make_tokenizer()).generate(BATCH, HOW)
        same.append(torch.equal(found.sequences, ours.sequences))
        with torch.no_grad():
            logits = actor.module.model(
                found.sequences, attention_mask=found.attention_mask, position_ids=found.position_ids
            ).logits
        logprobs = torch.log_softmax(logits[:, -found.response_length - 1 : -1].double(), -1)
        chosen = logprobs.gather(-1, found.responses[..., None])[..., 0]
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        gaps += [(found.logprobs - chosen).abs().max().item(), (found.entropy - entropy).abs().max().item()]
        update(actor)
    runner = type(core.model_executor.driver_worker.worker.model_runner).__mro__[1].__module__
    print(json.dumps({"runner": runner, "preempted": len(preempted), "same": same, "gap": max(gaps)}), flush=True)
    os._exit(0)  # vLLM's own end would wait for processes that it has not started


if __name__ == "__main__":
    main()
