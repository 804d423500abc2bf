"""What step 3 would refuse of a translation: flags of models that there are not, fields of the dialect without effect.

Another system passes over such a flag where step 3 refuses it: gamma without a discount, a critic's ZeRO stage without
a critic, the upper clip range of one optimizer step a rollout.
"""

from collections.abc import Iterator

from engine.algorithms import Dialect, check, get_dialect, parse_settings
from engine.algorithms.values import FieldError
from engine.errors import UserError
from training.convert.translation import Line, Translation, as_word
from training.flags.algorithm_flags import DIALECT_FLAGS

ADAPTERS = "it is computed by a trained model with its adapter off, and has no memory of its own"


def leave_out_refused(found: Translation) -> None:
    """Take out the lines that step 3 refuses beside the others. Why stands in found.idle where nothing is lost by it,
    and in found.missing where the value is one that a field cannot have. What is no value of its kind stays for step 3.
    """
    dialect = get_dialect(str(found.value("dialect")))
    for name, reason in list(_of_models(found, dialect)):
        found.idle += [f"{name} ({line.why}): {reason}" for line in found.taken_out(name)]
    _without_effect(found, dialect)


def _of_models(found: Translation, dialect: Dialect) -> Iterator[tuple[str, str]]:
    """The flags of models that there are not, and why."""
    flags = {line.flag: line.value for line in found.lines}
    reward, critic = (flags.get(f"{role}_model_name_or_path") for role in ("reward", "critic"))
    if not dialect.has_critic:
        for name in flags:
            if name.startswith("critic_") and name != "critic_model_name_or_path":  # which names the reward model, too
                yield name, f"the dialect {dialect.name} has no critic"
    if reward is None and ("reward_url" in flags or critic is None):
        yield "offload_reward_model", "there is no reward model"
    if "only_optimize_lora" in flags:
        yield "offload_reference_model", ADAPTERS
        if dialect.has_critic and "critic_lora_dim" in flags and reward is None:
            yield "offload_reward_model", ADAPTERS
    if str(flags.get("actor_zero_stage", 0)) == "0":
        yield "offload", "ZeRO stage 0 has nothing that could be offloaded"


def _without_effect(found: Translation, named: Dialect) -> None:
    lines = {field: line for line in found.lines for field in [_field(line)] if field}
    values: dict = {"mini_batches": _mini_batches(found, named)}
    for field, line in lines.items():
        try:
            values |= parse_settings([line.value if line.flag == "set" else f"{field}={as_word(line.value)}"])
        except UserError:
            continue
    while True:
        try:
            dialect = named.replaced(**values)
            break
        except FieldError as error:
            if error.field not in lines:
                return
            found.missing += _told(found, error.field, lines[error.field], error.reason)
            del values[error.field]
    for field in lines:
        try:
            check(dialect, given=[field])
        except UserError as error:
            reason = str(error).partition("is given, but ")[2].split(". ")[0]
            found.idle += _told(found, field, lines[field], reason)


def _field(line: Line) -> str | None:
    """The field of the dialect that a line gives a value."""
    return str(line.value).partition("=")[0] if line.flag == "set" else DIALECT_FLAGS.get(line.flag)


def _mini_batches(found: Translation, named: Dialect) -> int:
    """As step 3 counts them (training/flags/algorithm_flags.py)."""

    def size(name: str, default: int = 1) -> int:
        value = found.value(name)
        return default if value is None else int(str(value))

    samples = size("num_samples_per_prompt", named.samples_per_prompt)
    rows = size("per_device_generation_batch_size") * size("generation_batches") * samples
    return max(1, rows // (size("per_device_training_batch_size") * size("gradient_accumulation_steps")))


def _told(found: Translation, field: str, line: Line, reason: str) -> list[str]:
    """Take the line out, and say why, by the name that a user knows."""
    found.lines.remove(line)
    return [f"{field if line.flag == 'set' else line.flag} ({line.why}): {reason}"]
