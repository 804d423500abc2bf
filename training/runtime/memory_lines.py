"""The memory that a run will take on this machine, for --dry_run and training/memory_plan.py."""

from collections.abc import Callable, Sequence

import psutil
import torch

from engine import distributed
from engine.algorithms import Dialect
from engine.engine_spec import EngineSpec
from engine.errors import UserError
from engine.memory.changes import Setting, what_fits
from engine.memory.memory_plan import MemoryPlan, table, verdict
from engine.memory.planning import OneModel, plan_one_model
from engine.memory.workload import Cluster, Workload
from engine.zero.accelerator import on_gpu, ranks_of_this_machine
from training.config.flags import RunFlags
from training.config.step3 import RLHFFlags
from training.config.supervised import RewardFlags, SupervisedFlags


def workload(args: RLHFFlags, dialect: Dialect) -> Workload:
    """The workload (lengths, batches, rollouts) that step 3's flags describe."""
    return Workload(
        prompt=args.max_prompt_seq_len,
        response=args.max_answer_seq_len,
        generated=args.per_device_generation_batch_size * dialect.samples_per_prompt,
        responses=args.rows_per_rank,
        micro_batch=args.per_device_training_batch_size,
        mini_batches=dialect.mini_batches,
        ppo_epochs=dialect.ppo_epochs,
        critic_passes=dialect.critic_passes if dialect.critic_learns_apart else None,
        texts=args.unsupervised_dataset_name is not None,
        backend=args.rollout_backend,
        between_steps=args.replicas_between_steps,
        parts=args.vllm_tensor_parallel_size,
        group=args.inference_tp_size,
        evaluated=args.num_eval_prompts,
        checkpoints=args.schedule().copies,
    )


def this_cluster() -> Cluster:
    """A description of the run's machines, which assumes that all are like this one. The memory of a GPU is known only
    if this machine has GPUs."""
    gpus = ranks_of_this_machine()
    gpu = torch.cuda.mem_get_info()[1] if on_gpu() else None
    nodes = -(-distributed.world_size() // gpus)
    return Cluster(gpus=gpus, nodes=nodes, gpu=gpu, host=psutil.virtual_memory().total, on_gpu=on_gpu())


def setting_here(args: RLHFFlags, dialect: Dialect) -> Setting:
    """The planner's setting for step 3 on machines like this one."""
    return Setting(args.spec, workload(args, dialect), this_cluster())


def memory_lines(args: RLHFFlags, dialect: Dialect) -> list[str]:
    """The memory table of step 3 on machines like this one, and changes that would make the run fit; or a line that
    says why there is no table."""
    models = (args.actor_model_name_or_path, args.critic_model_name_or_path, args.reward_model_name_or_path)
    setting = setting_here(args, dialect)
    planned = _planned(args, models, setting.planned)
    if isinstance(planned, str):
        return [planned]
    others = "on other machines: training/memory_plan.py --gpu a100-80g --num_gpus 8, with the same flags"
    changes = change_lines(setting) if planned.fits is False else []
    return [table(planned, f"{distributed.ranks_in_words()}, {args.dtype}"), *changes, others]


def memory_of_one_model(args: SupervisedFlags) -> list[str]:
    """The memory table of step 1 or 2, or a line that says why there is no table."""
    planned = _planned(args, (args.model_name_or_path,), lambda: planned_model(args))
    return [planned if isinstance(planned, str) else table(planned, f"{distributed.ranks_in_words()}, {args.dtype}")]


def planned_model(args: SupervisedFlags) -> MemoryPlan:
    """The memory plan of step 1 or 2 on machines like this one. Raises UserError as `plan_one_model` does."""
    return plan_one_model(one_model(args), this_cluster())


def one_model(args: SupervisedFlags) -> OneModel:
    """The planner's description of the model of step 1 or 2 and of its training, from the flags."""
    scorer = isinstance(args, RewardFlags)
    return OneModel(
        path=args.model_name_or_path,
        scorer=scorer,
        engine=args.engine_config(),
        optimizer=args.optimizer(),
        dtype=str(args.dtype),
        rows=args.per_device_train_batch_size * (2 if scorer else 1),  # both responses of a pair
        length=args.max_seq_len,
        passes=args.gradient_accumulation_steps,
        checkpointing=args.gradient_checkpointing,
        checkpoints=args.schedule().copies,
        lora=args.lora(),
        trust_remote_code=args.trust_remote_code,
        attention=args.attention,
    )


def _planned(args: RunFlags, models: Sequence[str | None], make: Callable[[], MemoryPlan]) -> MemoryPlan | str:
    """The memory plan, or a line that says why there is no plan."""
    missing = [path for path in dict.fromkeys(models) if path is not None and not args.looks_at(path)]
    if missing:
        return f"memory plan: none, as the config.json of {' and '.join(missing)} is not on this machine"
    try:
        return make()
    except UserError as error:
        return f"memory plan: none. {error}"


def change_lines(setting: Setting) -> list[str]:
    """Lines that describe changes that make a setting fit; changes that cost the least speed come first."""
    found = what_fits(setting)
    if found is None:
        others = ["more GPUs would (--search gpus)", *_fewer_weights(setting.spec)]
        return [f"no change of batches, stages and offload makes it fit: {', or '.join(others)}"]
    changes, planned = found
    return [
        "it fits with these changes, the cheapest in speed first:",
        *(f"  {change.flags}" for change in changes),
        f"  then {verdict(planned)}",
    ]


def _fewer_weights(spec: EngineSpec) -> list[str]:
    """Descriptions of changes that reduce the memory of weights and optimizer states; [] if LoRA already saves all it
    can."""
    lora = spec.actor_lora
    if lora is None:
        flags = "--actor_lora_dim 16 --critic_lora_dim 16 --only_optimize_lora"
        return [f"LoRA ({flags}), which changes what is learned"]
    if not lora.only:
        return ["--only_optimize_lora, by which two trunks are held in place of four, and less is learned"]
    if spec.share_trunk:
        return []
    return ["--share_trunk, by which one trunk is held: the reward model has to be an adapter on the actor's base"]
