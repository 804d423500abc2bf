"""TRL's PPO: what fields mean together. Sizes are as in PPOTrainer.__init__ of trl/experimental/ppo/ppo_trainer.py."""

import math
import re
from collections.abc import Mapping

from engine.errors import UserError
from training.convert.translation import Given, System, Translation, generation_sizes
from training.convert.trl_table import SOURCE, TABLE

BEFORE_0_12 = (
    *("model_name", "steps", "ppo_epochs", "adap_kl_ctrl", "init_kl_coef", "kl_penalty", "target", "horizon"),
    *("query_dataset", "reward_model", "forward_batch_size", "backward_batch_size", "ratio_threshold", "score_clip"),
    *("use_score_scaling", "use_score_norm", "early_stopping", "target_kl", "compare_steps", "log_with", "task_name"),
    *("optimize_cuda_cache", "optimize_device_cache", "tracker_project_name", "tracker_kwargs", "is_peft_model"),
    *("accelerator_kwargs", "project_kwargs", "push_to_hub_if_best_kwargs", "is_encoder_decoder"),
)
"""Fields that the older PPOConfig has and this one has not."""


def not_before_0_12(fields: Mapping[str, object]) -> dict[str, object]:
    """The fields; raises UserError where several are those of the PPOConfig that another program had."""
    older = [name for name in BEFORE_0_12 if name in fields]
    if len(older) > 1:
        raise UserError(
            f"{', '.join(older)}: fields of the PPOConfig that TRL had before 0.12, the configuration of another "
            "program (PPOTrainer.step), which is not converted. Give step 3's flags by hand (docs/flags.md)."
        )
    return dict(fields)


def relations(given: Given, found: Translation, ranks: int | None) -> None:
    """The lines of fields that mean something together; raises UserError where sizes do not divide."""
    found.add("dialect", "trl_ppo", f"rewards, advantages and losses of {SOURCE}")
    _batches(given, found)
    updates = _length(given, found, ranks)
    _rates(given, found, updates)
    _precision(given, found)
    _adapters(given, found)
    _sharing(given, found)
    samples = given.integer("num_sample_generations")
    if updates is not None and samples:
        every = max(1, updates // samples)
        found.add("print_answers_interval", every, f"{updates} steps / num_sample_generations {samples}")
    elif not samples:
        found.add("print_answers_interval", 0, "num_sample_generations 0")
    found.missing.append(
        "prompts' length: TRL cuts none, --max_prompt_seq_len (256) cuts their beginning; --dry_run says how many"
    )
    found.missing.append(
        "ZeRO stages: they stand in accelerate's file there; give --actor_zero_stage, --critic_zero_stage"
    )


def _batches(given: Given, found: Translation) -> None:
    """A rank's responses in a step are per_device_train_batch_size x gradient_accumulation_steps. accelerate makes an
    optimizer step after each gradient_accumulation_steps micro-batches, whatever num_mini_batches."""
    size, passes, parts = (
        given.whole(name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches")
    )
    rows = size * passes
    if rows % parts:
        raise UserError(
            f"num_mini_batches {parts} does not divide per_device_train_batch_size {size} x "
            f"gradient_accumulation_steps {passes} = {rows}, which TRL refuses, too."
        )
    micro = min(size, rows // parts)
    if (rows // parts) % micro or rows % (micro * passes):
        raise UserError(
            f"num_mini_batches {parts} with gradient_accumulation_steps {passes}: TRL's micro-batches of a pass are no "
            "multiple of the latter, so that its optimizer steps cross from one pass to the next. Make one of them a "
            "multiple of the other."
        )
    product = f"per_device_train_batch_size {size} x gradient_accumulation_steps {passes} = {rows} prompts of a rank"
    at_once = given.whole("local_rollout_forward_batch_size")
    generation_sizes(found, rows, at_once, f"{product} in a step (earlier TRL: x num_mini_batches, too)")
    steps = rows // (micro * passes)
    found.add("per_device_training_batch_size", micro, f"min({size}, {rows} / num_mini_batches {parts})")
    found.add("gradient_accumulation_steps", passes, f"{steps} optimizer steps in a pass over {rows} responses")


def _length(given: Given, found: Translation, ranks: int | None) -> int | None:
    """How many steps there are, where that is known."""
    if given["total_episodes"] is None:
        epochs = given.number("num_train_epochs")
        if epochs != int(epochs):
            found.missing.append(f"num_train_epochs {epochs:g}: passes are whole here; give --max_steps")
        else:
            found.add("num_train_epochs", int(epochs), "as num_train_epochs, since there is no total_episodes")
        return None
    if ranks is None:
        raise UserError("total_episodes needs --ranks N, how many processes there were: it counts all their responses.")
    total, size = given.whole("total_episodes"), given.whole("per_device_train_batch_size")
    passes = given.whole("gradient_accumulation_steps")
    batch = size * passes * ranks
    updates = math.ceil(total / batch)
    found.add("max_steps", updates, f"total_episodes {total} / ({size} x {passes} x {ranks} ranks = {batch}), up")
    return updates


def _rates(given: Given, found: Translation, updates: int | None) -> None:
    rate = given.number("learning_rate")
    why = "learning_rate" + ("" if "learning_rate" in given.fields else ", its default") + ": one optimizer for both"
    found.add("actor_learning_rate", rate, why)
    found.add("critic_learning_rate", rate, why)
    betas = tuple(given.number(name) for name in ("adam_beta1", "adam_beta2"))
    if betas != (0.9, 0.999):
        found.set("betas", betas, "adam_beta1, adam_beta2")
    warmup, ratio = given.number("warmup_steps"), given["warmup_ratio"]
    if ratio and not warmup:
        if updates is None:
            found.missing.append(
                f"warmup_ratio {ratio}: give --num_warmup_steps, {ratio} times the steps, which --dry_run counts"
            )
            return
        warmup = math.ceil(given.number("warmup_ratio") * updates)
    if 0 < warmup < 1:  # which newer versions of transformers take for a ratio
        if updates is None:
            found.missing.append(
                f"warmup_steps {warmup:g}: a share; give --num_warmup_steps, {warmup:g} times the steps, which "
                "--dry_run counts"
            )
            return
        warmup = math.ceil(warmup * updates)
    if warmup:
        found.add("num_warmup_steps", math.ceil(warmup), "steps, since TRL's PPO changes the rate after each of them")
        found.set("warmup_from_zero", True, "as transformers' schedules")


def _precision(given: Given, found: Translation) -> None:
    fp16 = given.true("fp16")
    bf16 = not fp16 if given["bf16"] is None else given.true("bf16")
    if fp16 and bf16:
        raise UserError("bf16 and fp16 are both on. Leave one.")
    why = "bf16" if bf16 else "fp16" if fp16 else "neither bf16 nor fp16"
    default = ", on by default" if given["bf16"] is None and bf16 else ""
    found.add("dtype", "bf16" if bf16 else "fp16" if fp16 else "fp32", why + default)


def _adapters(given: Given, found: Translation) -> None:
    if not given.true("use_peft"):
        return
    found.add("actor_lora_dim", given.whole("lora_r"), "use_peft: TRL's PPO adapts the policy alone; lora_r")
    found.add("only_optimize_lora", True, "peft trains the factors alone")
    found.add("lora_alpha", given.number("lora_alpha"), "lora_alpha")
    found.add("actor_lora_learning_rate", given.number("learning_rate"), "learning_rate: it is the factors', too")
    modules = given["lora_target_modules"]
    if modules is not None:
        found.add("lora_target_modules", modules, "lora_target_modules")
    else:
        found.missing.append(
            "lora_target_modules: peft chooses a family's own, such as q_proj v_proj; here all linear layers, unless "
            "--lora_target_modules says otherwise"
        )
    if given.number("lora_dropout"):
        found.missing.append(f"lora_dropout {given['lora_dropout']}: step 3 trains without dropout")


def _sharing(given: Given, found: Translation) -> None:
    place = given["hub_model_id"]
    if not given.true("push_to_hub"):
        if place is not None:
            found.idle.append(f"hub_model_id {place}: nothing is uploaded without push_to_hub")
    elif place is None or "/" not in str(place):
        found.missing.append("push_to_hub true: give --push_to_hub and whose it is to be, --hub_model_id OWNER/NAME")
    else:
        found.add("push_to_hub", True, "push_to_hub")
        found.add("hub_model_id", place, "hub_model_id")
        if given["hub_private_repo"] is not None:
            found.add("hub_private", given.true("hub_private_repo"), "hub_private_repo")


TRL = System(
    name="TRL",
    source=SOURCE,
    table=TABLE,
    relations=relations,
    named=not_before_0_12,
    program=re.compile(r"\.py\b"),
    program_name="a script of TRL's (*.py)",
)
