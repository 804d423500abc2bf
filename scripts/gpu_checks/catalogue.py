"""All checks, in the order in which they are made: what the rest stands on, then what is dearest."""

from scripts.gpu_checks.check import Check


def _of(module: str, function: str) -> str:
    return f"scripts.gpu_checks.{module}:{function}"


CHECKS = [
    Check("machine", _of("machine", "look"), limit=45),
    Check("steps bf16", _of("steps", "at_all_stages"), ("bf16",), limit=90),
    Check("graphs", _of("decoding", "against_plain"), ("graphs",), limit=60),
    Check("offload", _of("steps", "offloaded"), least=60, limit=120),
    Check("steps fp16", _of("steps", "at_all_stages"), ("fp16",), limit=90),
    Check("compiled", _of("decoding", "against_plain"), ("compiled",), least=60, limit=120),
]
