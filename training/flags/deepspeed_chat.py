"""Flags of DeepSpeed-Chat's scripts that have nothing left to do here, and what does their work now.

Names and kinds are those of DeepSpeedExamples 83757d9c, applications/DeepSpeed-Chat/training/step*/main.py, and of the
scripts beside them.
"""

from training.flags.arguments import OldFlag

ALL_STEPS = {
    "deepspeed": OldFlag(bool, "every engine is DeepSpeed's anyway."),
    "deepspeed_config": OldFlag(
        str,
        "name one file for each engine instead: --ds_config in steps 1 and 2, "
        "--actor_ds_config and its like in step 3.",
        allowed=(),
    ),
    "num_padding_at_beginning": OldFlag(
        int, "masks and position ids come from what is real, whatever padding precedes it."
    ),
    "add_eot_token": OldFlag(
        bool, "every text ends with the tokenizer's own EOS token anyway, which is what the models learn to stop with."
    ),
    "compute_fp32_loss": OldFlag(bool, "every loss is computed in float32 anyway."),
}

OLD_BACKENDS = {
    "hybrid": "DeepSpeed's hybrid engine cannot generate with this version of transformers. Its fused layers keep "
    "keys and values in an argument `layer_past`, which transformers 5 no longer gives (models share one cache, "
    "`past_key_values`), and they are CUDA kernels. Take auto or replica, which gathers the weights once per update "
    "too."
}

SUPERVISED = {
    **ALL_STEPS,
    "disable_dropout": OldFlag(bool, "dropout is off anyway; --dropout turns it on."),
    "print_loss": OldFlag(bool, "the loss stands behind the progress bar anyway."),
    "eval_iters": OldFlag(int, "all held-out rows are evaluated; --held_out says how many those are."),
    "no_bf16_to_fp32_loss": OldFlag(bool, "every loss is computed in float32.", allowed=()),
    "no_fused_kernels": OldFlag(bool, "torch's own fused AdamW is used, which needs no kernel to be built."),
}

STEP3 = {
    **ALL_STEPS,
    "enable_hybrid_engine": OldFlag(
        bool, "--rollout_backend does its work: replica gathers the weights once an update."
    ),
    "unpin_actor_parameters": OldFlag(bool, "--rollout_backend zero3 keeps the weights partitioned while generating."),
    "release_inference_cache": OldFlag(bool, "what generation needs is released after it anyway."),
    "tp_gather_partition_size": OldFlag(int, "weights are gathered by buckets of one size, whatever the layers are."),
    "preprocessing_num_workers": OldFlag(int, "texts are tokenised once, and kept for the next run."),
    "align_overflow": OldFlag(bool, "actor and critic always skip an overflowing step together."),
    "print_answers": OldFlag(bool, "samples are printed every --print_answers_interval steps anyway."),
    "disable_actor_dropout": OldFlag(bool, "dropout is off anyway."),
    "disable_critic_dropout": OldFlag(bool, "dropout is off anyway."),
    "enable_mixed_precision_lora": OldFlag(
        bool,
        "it rounds the frozen weights to 8 bits (ZeRO++), after which actor and reference are no longer the model that "
        "was given. Leave it out: --dtype bf16 or fp16 holds them in 16.",
        allowed=(),
    ),
    "per_device_train_batch_size": OldFlag(
        int,
        "for prompts answered at once, as DeepSpeed-Chat's older scripts have it, --per_device_generation_batch_size; "
        "for responses in one forward and backward pass, as TRL has it, --per_device_training_batch_size.",
        allowed=(),
    ),
    "per_device_mini_train_batch_size": OldFlag(int, "renamed: --per_device_training_batch_size.", allowed=()),
    "generation_batch_numbers": OldFlag(int, "renamed: --generation_batches.", allowed=()),
}
