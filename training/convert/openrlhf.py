"""OpenRLHF's PPO and its kind without a critic: what flags mean together."""

import re
from collections.abc import Mapping

from engine.algorithms import ESTIMATORS, get_dialect
from engine.errors import UserError
from training.convert.openrlhf_table import RENAMED, SOURCE, TABLE
from training.convert.translation import Given, System, Translation, generation_sizes
from training.flags.reward_server_flags import check_reward_url

DIALECTS = {
    "gae": "default",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
}
"""By advantage_estimator."""
AS_GAE = (  # where PPO differs from the dialect default, as reinforce_pp has it of the same code
    ("old_logprobs", "forward", "log-probs come from a second pass"),
    ("min_response_tokens", 0, "all responses are learned from"),
    ("warmup_from_zero", True, "as transformers' schedules"),
)
OF_GAE = (("lambd", "lam"), ("value_clip", "value_clip_range"))
"""What means something with a critic alone."""
SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")
"""Those that are called so here, too."""
LABELS = "columns are given to reward functions by their own names (docs/verifiable.md)"


def with_old_names(fields: Mapping[str, object]) -> dict[str, object]:
    """The fields by the table's names; raises UserError where one is given by both of its names."""
    found: dict[str, object] = {}
    for name, value in fields.items():
        old = RENAMED.get(name, name)
        if old in found:
            raise UserError(f"{name}: {old} is given, too, which is the same. Leave one.")
        found[old] = value
    return found


def relations(given: Given, found: Translation, ranks: int | None) -> None:
    """The lines of flags that mean something together; raises UserError where sizes do not divide."""
    estimator = str(given["advantage_estimator"])
    if estimator not in DIALECTS:
        raise UserError(f"advantage_estimator {estimator}: known are {', '.join(DIALECTS)}.")
    dialect = get_dialect(DIALECTS[estimator])
    if ESTIMATORS[dialect.advantage_estimator].needs_groups and given.whole("n_samples_per_prompt") < 2:
        raise UserError(
            f"n_samples_per_prompt {given['n_samples_per_prompt']}: advantage_estimator {estimator} compares the "
            "responses to one prompt with each other. Give 2 or more."
        )
    found.add("dialect", dialect.name, f"advantage_estimator {estimator}")
    if estimator == "gae":
        for name, value, why in AS_GAE:
            found.set(name, value, why)
        for name, flag in OF_GAE:
            found.add(flag, given.number(name), name + ("" if name in given.fields else ", its default"))
    elif not estimator.startswith("reinforce"):
        found.missing.append(
            f"advantage_estimator {estimator}: the dialect is that of its paper or TRL; OpenRLHF's own form of it "
            "differs in details (docs/dialects.md)"
        )
    _models(given, found, estimator)
    _data(given, found)
    steps = _batches(given, found, ranks)
    _rates(given, found, estimator, steps)
    _scores_and_kl(given, found)
    _saving(given, found)
    _precision_and_adapters(given, found, estimator)


def _models(given: Given, found: Translation, estimator: str) -> None:
    reward, critic, remote = (given[name] for name in ("reward_pretrain", "critic_pretrain", "remote_rm_url"))
    if reward is not None and "," in str(reward):
        found.missing.append(
            f"reward_pretrain {reward}: one reward model; others as --reward_function (docs/extending.md)"
        )
        reward = str(reward).split(",")[0]
    if remote is not None:
        reward = None  # it is not asked then
        _server(given, found)
    elif given["label_key"] is not None:
        found.missing.append(f"label_key {given['label_key']}: {LABELS}")
    if estimator != "gae" or critic is None:
        if reward is not None:
            found.add(
                "critic_model_name_or_path",
                reward,
                "reward_pretrain" + (", from which the critic begins" if estimator == "gae" else ""),
            )
        return
    found.add("critic_model_name_or_path", critic, "critic_pretrain")
    if reward is not None and reward != critic:
        found.add("reward_model_name_or_path", reward, "reward_pretrain")


def _server(given: Given, found: Translation) -> None:
    remote, label = str(given["remote_rm_url"]), given["label_key"]
    urls = remote.split(",")
    if not all(url.startswith(("http://", "https://")) for url in urls):
        found.missing.append(
            f"remote_rm_url {remote}: --reward_function takes score(prompts, responses) of a file (docs/verifiable.md)"
        )
        return
    for url in urls:
        check_reward_url(url)  # before one with a password is written into a file
    found.add("reward_url", urls, "remote_rm_url")
    found.add("reward_url_form", "openrlhf", "what such a server is sent")
    if label is not None:
        found.add("reward_url_columns", [label], "label_key")


def _data(given: Given, found: Translation) -> None:
    for name, flag in (("prompt_data", "data_path"), ("eval_dataset", "eval_data_path")):
        if given[name] is not None:
            found.add(flag, str(given[name]).split(","), name)
    if given["input_key"] not in ("prompt", "messages"):
        default = "" if "input_key" in given.fields else ", its default"
        found.missing.append(
            f"input_key {given['input_key']}{default}: prompts stand in the column prompt or messages; rename it"
        )
    answer, prompt = (
        None if given[name] is None else given.whole(name) for name in ("generate_max_len", "prompt_max_len")
    )
    if given["max_len"] is not None:
        if answer is None:
            raise UserError("max_len without generate_max_len (rollout.max_new_tokens): give the latter, too.")
        prompt = given.whole("max_len") - answer
        if prompt < 1:
            raise UserError(f"max_len {given['max_len']}: generate_max_len {answer} leaves no room for a prompt.")
        found.add("max_prompt_seq_len", prompt, f"max_len {given['max_len']} - {answer}")
    else:
        found.add("max_prompt_seq_len", prompt or 1024, "prompt_max_len" + ("" if prompt else ", its default"))
    found.add("max_answer_seq_len", answer or 1024, "generate_max_len" + ("" if answer else ", its default"))
    if given["overlong_buffer_len"] is not None:
        share = given.number("overlong_buffer_len") / (answer or 1024)
        found.set("overlong_buffer", share, f"overlong_buffer_len {given['overlong_buffer_len']} / generate_max_len")


def _batches(given: Given, found: Translation, ranks: int | None) -> int:
    """Returns the optimizer steps of one pass over a step's responses."""
    placed = given.whole("actor_num_nodes") * given.whole("actor_num_gpus_per_node")
    world = ranks or placed
    told = f"{world} ranks" + ("" if ranks else " (actor_num_nodes x actor_num_gpus_per_node)")
    if not ranks:
        nodes, gpus = given.whole("actor_num_nodes"), given.whole("actor_num_gpus_per_node")
        found.launcher += (f" --num_nodes {nodes}" if nodes > 1 else "") + f" --num_gpus {gpus}"
    prompts, samples, batch = (
        given.whole(name) for name in ("rollout_batch_size", "n_samples_per_prompt", "train_batch_size")
    )
    micro = given.whole("micro_train_batch_size")
    if prompts % world:
        raise UserError(f"rollout_batch_size {prompts} is no multiple of {told}. Give other --ranks.")
    if batch % (micro * world):
        raise UserError(
            f"train_batch_size {batch} is no multiple of micro_train_batch_size {micro} x {told}. Give other --ranks."
        )
    if prompts * samples % batch:
        raise UserError(
            f"rollout_batch_size {prompts} x n_samples_per_prompt {samples} is no multiple of train_batch_size {batch}."
        )
    at_once = max(1, given.whole("micro_rollout_batch_size") // samples)
    generation_sizes(found, prompts // world, at_once, f"rollout_batch_size {prompts} / {told}")
    found.add("per_device_training_batch_size", micro, f"micro_train_batch_size {micro}")
    passes, steps = batch // (micro * world), prompts * samples // batch
    why = f"train_batch_size {batch} / ({micro} x {world}): {steps} optimizer steps in a pass over the responses"
    found.add("gradient_accumulation_steps", passes, why)
    return steps


def _rates(given: Given, found: Translation, estimator: str, steps: int) -> None:
    if estimator == "gae":
        default = "" if "critic_learning_rate" in given.fields else ", its default"
        found.add("critic_learning_rate", given.number("critic_learning_rate"), "critic_learning_rate" + default)
    schedule = str(given["lr_scheduler"])
    if schedule == "cosine_with_min_lr":
        found.add("lr_scheduler_type", "cosine", "lr_scheduler cosine_with_min_lr")
        found.missing.append("lr_scheduler cosine_with_min_lr: its rate falls to a tenth of the peak, here to 0")
    elif schedule in SCHEDULES:
        found.add("lr_scheduler_type", schedule, "lr_scheduler")
    else:
        found.missing.append(f"lr_scheduler {schedule}: take one of {', '.join(SCHEDULES)}")
    ratio, epochs = given.number("lr_warmup_ratio"), given.whole("max_epochs")
    if ratio:
        own = get_dialect(DIALECTS[estimator]).warmup_steps
        found.missing.append(
            f"lr_warmup_ratio {given['lr_warmup_ratio']}: give --num_warmup_steps, {ratio:g} x {steps} x max_epochs "
            f"{epochs} = {ratio * steps * epochs:g} times the steps, which --dry_run counts; without it the dialect's, "
            f"{own}"
        )
    betas = given.numbers("adam_betas", 2)
    if betas != [0.9, 0.95]:
        found.set("betas", tuple(betas), "adam_betas")


def _scores_and_kl(given: Given, found: Translation) -> None:
    if given["kl_target"] is not None and not given.number("init_kl_coef"):
        found.idle.append(f"kl_target {given['kl_target']}: init_kl_coef is 0, and stays that")
    elif given["kl_target"] is not None:
        found.set("kl_controller", "adaptive", "kl_target is given")
        found.set("kl_target", given.number("kl_target"), "kl_target")
        found.set("kl_horizon", given.number("kl_horizon"), "kl_horizon")
    if given["eps_clip_low_high"] is not None:
        low, high = given.numbers("eps_clip_low_high", 2)
        found.add("clip_range", low, "eps_clip_low_high, the first")
        found.set("clip_range_high", high, "eps_clip_low_high, the second")
    else:
        found.add("clip_range", given.number("eps_clip"), "eps_clip")
    low, high = given.numbers("reward_clip_range", 2)
    if low == -high and high > 0:
        found.add("score_clip", high, "reward_clip_range, on both sides alike")
    else:
        found.missing.append(
            f"reward_clip_range {low:g} {high:g}: scores are clipped to plus or minus one number (--score_clip)"
        )
    if given.true("enable_vllm_is_correction"):
        limit = given.number("vllm_is_truncated_threshold")
        found.set("correction", "token_truncate", "enable_vllm_is_correction")
        found.set("correction_max", limit, "vllm_is_truncated_threshold")


def _saving(given: Given, found: Translation) -> None:
    saves, looks, warm = (given.integer(name) for name in ("save_steps", "eval_steps", "freezing_actor_steps"))
    if saves > 0:
        found.add("save_steps", saves, "save_steps")
        found.add("keep_checkpoints", given.whole("max_ckpt_num"), "max_ckpt_num")
    if looks > 0:
        found.add("eval_steps", looks, "eval_steps")
    if warm > 0:
        found.add("critic_warmup_steps", warm, "freezing_actor_steps")
    if given.true("enable_ema"):
        found.add("ema_decay", given.number("ema_beta"), "ema_beta")


def _precision_and_adapters(given: Given, found: Translation, estimator: str) -> None:
    named = given["param_dtype"]
    if named is None:
        found.add("dtype", *(("bf16", "bf16") if given.true("bf16") else ("fp16", "bf16 is not given")))
    elif named in ("bf16", "fp16"):
        found.add("dtype", named, "param_dtype")
    else:
        raise UserError(f"param_dtype {named}: known are bf16 and fp16.")
    rank = given.integer("lora_rank")
    if rank <= 0:
        return
    found.add("actor_lora_dim", rank, "lora_rank")
    found.add("actor_lora_learning_rate", given.number("actor_learning_rate"), "actor_learning_rate: the factors', too")
    if estimator == "gae":
        found.add("critic_lora_dim", rank, "lora_rank")
        rate = given.number("critic_learning_rate")
        found.add("critic_lora_learning_rate", rate, "critic_learning_rate: the factors', too")
    found.add("only_optimize_lora", True, "peft trains the factors alone")
    found.add("lora_alpha", given.number("lora_alpha"), "lora_alpha")
    modules = given["target_modules"]
    if modules != "all-linear":
        found.add("lora_target_modules", modules, "target_modules")


OPENRLHF = System(
    name="OpenRLHF",
    source=SOURCE,
    table=TABLE,
    relations=relations,
    named=with_old_names,
    program=re.compile("train_ppo_ray"),
    program_name="train_ppo_ray",
)
