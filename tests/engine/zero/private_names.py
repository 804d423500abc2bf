"""Names of DeepSpeed's that are no part of its documented interface, and that engine/zero uses all the same.

When a new version moves one, tests/engine/zero/test_private_names.py fails with a sentence that names it. Everything
else that engine/zero calls is documented: initialize, init_distributed, the engine's own methods, zero.Init and
zero.GatheredParameters, set_z3_leaf_modules, get_accelerator, DeepSpeedCPUAdam; HfDeepSpeedConfig of transformers.
"""

from dataclasses import dataclass

_ZERO3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_ZERO12 = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
_MASTERS = "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer"
_PARTITIONS = "deepspeed.runtime.zero.partition_parameters"
_BACKEND = "deepspeed.comm.torch.TorchBackend"


@dataclass(frozen=True, slots=True)
class PrivateName:
    """owner: the import path of a module or class that has the name, or whose code sets it as an attribute.

    use: what it is needed for. public: the documented call that would do, or why none does.
    """

    owner: str
    name: str
    use: str
    public: str


PRIVATE_NAMES = (
    # engine/zero/gathering.py
    PrivateName(
        _PARTITIONS, "ds_id", "telling a partitioned parameter", "none says whether a parameter is partitioned"
    ),
    PrivateName(_PARTITIONS, "ds_shape", "the full shape of a partitioned parameter", "none without gathering it"),
    PrivateName(_PARTITIONS, "ds_numel", "the full size of a partitioned parameter", "none without gathering it"),
    PrivateName(
        _PARTITIONS,
        "ds_status",
        "gathering only what is away",
        "GatheredParameters partitions what already stood gathered when it ends",
    ),
    PrivateName(f"{_PARTITIONS}.ZeroParamStatus", "NOT_AVAILABLE", "the status of what is away", "as for ds_status"),
    PrivateName(
        _PARTITIONS,
        "ds_tensor",
        "gathering whole weights with one collective call a bucket",
        "GatheredParameters, which has all ranks compare notes on each parameter first",
    ),
    PrivateName(f"{_PARTITIONS}.ZeroParamStatus", "AVAILABLE", "the status of what is gathered", "as for ds_status"),
    # engine/zero/gathering.py
    PrivateName(
        "deepspeed.utils.groups",
        "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
        "groups of each engine's own for hpZ",
        "zero_param_parallel_group of zero.Init, which transformers does not give, and initialize does not have",
    ),
    PrivateName(
        "deepspeed.utils.groups",
        "_create_zero_param_parallel_group",
        "making these groups once in a process",
        "none: zero.Init makes them by this function whenever its configuration has hpZ",
    ),
    PrivateName(
        _PARTITIONS,
        "ds_secondary_tensor",
        "gathering anew what a checkpoint has put into frozen weights",
        "none: it is taken for what never changes",
    ),
    # engine/zero/gather_once.py
    PrivateName(
        _PARTITIONS,
        "ds_active_sub_modules",
        "weights that stay gathered over several passes",
        "GatheredParameters, around passes whose hooks partition what they have used",
    ),
    PrivateName(_PARTITIONS, "ds_persist", "leaving gathered what always is", "none tells"),
    PrivateName(
        "deepspeed.runtime.sequence_parallel.ulysses_sp",
        "ds_grad_is_ready",
        "gradients that are added up before they are reduced",
        "no_sync, which stage 3 refuses",
    ),
    # engine/zero/stages.py, stage 3
    PrivateName(
        _ZERO3,
        "fp16_groups",
        "whose runs lie in which master, for checkpoints that other ranks and stages can read",
        "save_checkpoint, and a conversion of what it wrote",
    ),
    PrivateName(
        _ZERO3,
        "fp32_partitioned_groups_flat",
        "this rank's master weights, in place",
        "safe_get_local_fp32_param, which copies each to the GPU where the optimizer is offloaded, in every update of "
        "the moving average",
    ),
    PrivateName(
        _ZERO3,
        "_reassign_or_swap_out_partitioned_parameters",
        "the weights that the masters hold",
        "safe_set_local_fp32_param, which changes the master alone, and the weights at the next optimizer step",
    ),
    PrivateName(
        _ZERO3, "checkpoint_event_prologue", "partitioning what stands gathered", "save_checkpoint, which writes files"
    ),
    PrivateName(
        _ZERO3,
        "checkpoint_event_epilogue",
        "gathering what is never partitioned",
        "save_checkpoint, which writes files",
    ),
    PrivateName(
        _ZERO3,
        "grad_partitions_flat_buffer",
        "gradients of 0 for parameters that the first backward pass does not reach",
        "none: it overwrites what it reaches, later ones add to what lies there from the step before",
    ),
    # stages 1 and 2
    PrivateName(
        _ZERO12,
        "single_partition_of_fp32_groups",
        "this rank's master weights, in place",
        "safe_get_full_fp32_param, which gathers each parameter; local ones are for stage 3 alone",
    ),
    PrivateName(
        _ZERO12,
        "round_robin_bit16_groups",
        "whose numbers lie in which master",
        "save_checkpoint, and a conversion of what it wrote",
    ),
    PrivateName(_ZERO12, "round_robin_bit16_offsets", "where in it they lie", "as for round_robin_bit16_groups"),
    PrivateName(
        _ZERO12,
        "update_lp_params",
        "the weights that the masters hold",
        "safe_set_full_fp32_param, which changes the master alone",
    ),
    PrivateName(
        _ZERO12,
        "check_grad_overflow",
        "looking for an overflow once",
        "bf16.check_grad_overflow of the configuration, which fp16 does not have",
    ),
    # stages 1 to 3
    *(
        PrivateName(owner, name, use, public)
        for owner in (_ZERO3, _ZERO12)
        for name, use, public in (
            ("loss_scaler", "the loss scale's counters, for checkpoints", "save_checkpoint, which writes files"),
            ("dynamic_loss_scale", "whether it has counters", "the configuration, read as DeepSpeed reads it"),
            ("has_overflow", "looking at gradients before the step", "none tells before the step"),
            ("override_loss_scale", "a step that divides by the scale it was multiplied by", "none"),
            ("loss_scaler", "the next name's holder", "none gives it"),
            (
                "averaged_gradients",
                "the gradient norm of each model that an engine trains, before the step",
                "safe_get_full_grad, which gathers each parameter",
            ),
            ("custom_loss_scaler", "taking the overriding scale away again", "none takes it away"),
        )
    ),
    PrivateName(
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "raise_error_at_min_scale",
        "going on after one overflow at the smallest loss scale",
        "none: the configuration has no field for it",
    ),
    # stage 0 in 16 bits
    PrivateName(_MASTERS, "fp16_groups", "the weights that belong to the masters", "none at stage 0"),
    PrivateName(_MASTERS, "fp32_groups", "the master weights", "safe_get_full_fp32_param is for stages 1 to 3"),
    PrivateName(_MASTERS, "refresh_fp32_params", "masters as loaded, undecayed", "load_checkpoint, which reads files"),
    PrivateName(_MASTERS, "loss_scale_config", "the loss scale's state", "the engine's loss scale is the number alone"),
    PrivateName(
        "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig", "dynamic_loss_scale", "keeping the scale", "none"
    ),
    PrivateName("deepspeed.runtime.fp16.loss_scaler.LossScaleConfig", "cur_iter", "counting a step once", "none"),
    PrivateName(_MASTERS, "_update_scale", "changing the scale after the step and not within", "none"),
    # engine/zero/training_state.py
    *(
        PrivateName(
            "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler", name, "checkpoints", "none gives the counters"
        )
        for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
    ),
    *(
        PrivateName(
            "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig", name, "checkpoints", "none gives the counters"
        )
        for name in ("cur_scale", "last_overflow_iter")
    ),
    *(
        PrivateName(
            "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",
            name,
            "setting the powers of beta that it keeps in C++",
            "none: load_state_dict leaves them",
        )
        for name in ("ds_opt_adam", "opt_id")
    ),
    # engine/zero/communication.py
    PrivateName("deepspeed.launcher.runner", "fetch_hostfile", "counting a dry run's processes", "the launcher itself"),
    PrivateName("deepspeed.comm.comm", "cdb", "the backend that ZeRO calls", "none gives it"),
    PrivateName(_BACKEND, "all_gather_function", "gathering by broadcasts with gloo, four times as fast", "none"),
    PrivateName(_BACKEND, "reduce_scatter_function", "reducing in place with gloo, which is faster", "none"),
    # engine/zero/communication.py
    PrivateName(
        "deepspeed.comm.torch",
        "build_shm_op",
        "making no buffers in shared memory, which nothing here uses and nobody removes",
        "none; without the launcher's LOCAL_SIZE none are made, but the extension is still compiled for nothing",
    ),
    # engine/zero/partitioned_loading.py, accelerator.py, config.py
    PrivateName(
        "deepspeed.runtime.zero.linear",
        "zero3_linear_wrap",
        "taking back torch's linear function, which it replaces for the whole process",
        "none switches it off",
    ),
    PrivateName(
        "deepspeed.accelerator.abstract_accelerator.DeepSpeedAccelerator",
        "create_op_builder",
        "building an extension one process at a time",
        "DS_BUILD_OPS when DeepSpeed is installed",
    ),
    PrivateName("deepspeed.runtime.config", "DeepSpeedConfig", "checking a user's JSON early", "initialize, late"),
    PrivateName("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig", "ZeRO's defaults in the plan", "none"),
)
