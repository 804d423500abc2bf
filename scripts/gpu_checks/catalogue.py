"""All checks, in the order in which they are made: what the rest stands on, then what is dearest."""

from scripts.gpu_checks.check import Check


def _of(module: str, function: str) -> str:
    return f"scripts.gpu_checks.{module}:{function}"


CHECKS = [
    Check("machine", _of("machine", "look"), limit=45),
    Check("graphs", _of("decoding", "against_plain"), ("graphs", "gqa", "gqa", "fp32", "16 bits"), limit=60),
    Check("graphs 1.3b", _of("decoding", "against_plain"), ("graphs", "opt-1.3b", "opt-350m", "16 bits"), limit=75),
    Check("steps bf16", _of("steps", "at_all_stages"), ("bf16",), limit=90),
    Check("benchmark 1.3b", _of("benchmark", "shares"), ("opt-1.3b", "opt-350m"), least=40, limit=120),
    Check("memory", _of("memory", "planned"), least=30, limit=90),
    Check("attention", _of("attention", "against_math"), limit=60),
    Check("auto", _of("copies", "under_limits"), limit=60),
    Check("between steps", _of("copies", "between_steps"), limit=60),
    Check("offload", _of("steps", "offloaded"), least=60, limit=120),
    Check("restart", _of("restarts", "resumed"), limit=60),
    Check("adapters", _of("adapters", "learn"), limit=60),
    Check("steps fp16", _of("steps", "at_all_stages"), ("fp16",), limit=90),
    Check("quickstart", _of("quickstart", "learned"), least=60, limit=150),
    Check("vllm", _of("vllm", "alike"), least=30, limit=150),
    Check("benchmark 350m", _of("benchmark", "shares"), ("350m", "350m"), least=30, limit=60),
    Check(
        "ranks",
        _of("ranks", "side_by_side"),
        least=40,
        limit=180,
        ranks=2,
        unseen="NCCL, partitions and their gathers, copies that ranks hold together, time-outs of groups",
    ),
    Check("machines", _of("machine", "between_machines"), least=0),
]
