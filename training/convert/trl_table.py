"""TRL's PPO, field by field: its PPOConfig (with transformers' TrainingArguments), ScriptArguments and ModelConfig.

Of huggingface/trl, trl/experimental/ppo/ppo_config.py, ppo_trainer.py and ppo.py (496cb7fa, 0062ee10, 9bbcd08a).
Defaults are those of these files and of transformers. The dialect is trl_ppo, which has the defaults of fields that are
its own.
"""

from training.convert.entries import Entry, absent, dialect, idle, related, same

SOURCE = "TRL's experimental PPO of 2026 (trl/experimental/ppo, 496cb7fa)"
COMPUTED = idle("TRL computes it, whatever is given")
LAUNCHED = idle("the launcher's: deepspeed --num_gpus N")
METRICS = idle("metrics are written after each step: metrics.jsonl, TensorBoard, --wandb_project")
BITS = "weights here are of 16 or 32 bits: --actor_lora_dim, --offload, or ZeRO stage 3 save memory"
LORA_KIND = "adapters here are LoRA as peft has it by default (docs/lora.md)"

SCRIPT: dict[str, Entry] = {
    "dataset_name": same("data_path"),
    "dataset_config": absent("no configuration of prompts' data sets: give files of it to --data_path"),
    "dataset_train_split": absent(
        "splits are chosen by their names: give the file of this one to --data_path", "train"
    ),
    "dataset_test_split": absent("give the file of this one to --eval_data_path", "test"),
    "dataset_streaming": absent("data are read from files, without being held in memory", False),
    "gradient_checkpointing_use_reentrant": idle("how checkpointing is done changes no number"),
    "ignore_bias_buffers": idle("of torch's DDP, which is not used"),
}
MODEL: dict[str, Entry] = {
    "sft_model_path": same("actor_model_name_or_path", default="EleutherAI/pythia-160m"),
    "reward_model_path": same(
        "critic_model_name_or_path",
        default="EleutherAI/pythia-160m",
        note="critic and reward model begin as it, as TRL's script has it",
    ),
    "model_name_or_path": idle("TRL's script takes the tokenizer alone from it; here it is the actor folder's"),
    "model_revision": absent("give a folder of that revision (hf download --revision)", "main"),
    "dtype": idle("how weights are loaded: trained ones have float32 masters, --dtype is what is computed in"),
    "torch_dtype": idle("how weights are loaded: trained ones have float32 masters, --dtype is what is computed in"),
    "trust_remote_code": same("trust_remote_code"),
    "attn_implementation": same(
        "attn_implementation",
        values={name: name for name in ("eager", "sdpa", "flash_attention_2", "flash_attention_3")},
        otherwise="give another --attn_implementation",
    ),
    **{name: related(default) for name, default in (("use_peft", False), ("lora_r", 16), ("lora_alpha", 32))},
    "lora_dropout": related(0.05),
    "lora_target_modules": related(None),
    "lora_modules_to_save": absent("weights that train beside the factors: leave --only_optimize_lora out"),
    "lora_task_type": idle("it is known from the model's role"),
    "lora_target_parameters": absent(LORA_KIND),
    "use_rslora": absent(LORA_KIND, False),
    "use_dora": absent(LORA_KIND, False),
    "load_in_8bit": absent(BITS, False),
    "load_in_4bit": absent(BITS, False),
    "bnb_4bit_quant_type": idle("of weights of 4 bits alone"),
    "bnb_4bit_quant_storage": idle("of weights of 4 bits alone"),
    "use_bnb_nested_quant": idle("of weights of 4 bits alone"),
}
PPO: dict[str, Entry] = {
    "num_ppo_epochs": same("ppo_epochs"),
    "kl_coef": same("kl_coef"),
    "kl_estimator": dialect("kl_estimator", values={"k1": "k1", "k3": "k3"}),
    "cliprange": same("clip_range"),
    "cliprange_value": same("value_clip_range"),
    "vf_coef": dialect("value_factor", note="the critic has an optimizer of its own, which it changes little"),
    "gamma": same("gamma"),
    "lam": same("lam"),
    "whiten_rewards": dialect("whiten_rewards"),
    "temperature": same("temperature"),
    "missing_eos_penalty": same("missing_eos_penalty"),
    "response_length": same("max_answer_seq_len", default=53),
    "stop_token": dialect("truncate_token", values={"eos": "eos"}),
    "stop_token_id": absent("--set truncate_token=TEXT names a token by its text; for EOS truncate_token=eos"),
    **{name: related(value) for name, value in (("num_mini_batches", 1), ("total_episodes", None))},
    "local_rollout_forward_batch_size": related(64),
    "num_sample_generations": related(10),
    "ds3_gather_for_generation": same("rollout_backend", values={True: "auto", False: "zero3"}),
    **dict.fromkeys(("world_size", "num_total_batches", "micro_batch_size", "local_batch_size"), COMPUTED),
    **dict.fromkeys(("batch_size", "local_mini_batch_size", "mini_batch_size"), COMPUTED),
    "exp_name": idle("runs are named after their folders"),
    "model_adapter_name": absent(LORA_KIND),
    "ref_adapter_name": absent("the reference is the actor with its adapters off"),
    "dataset_num_proc": idle("texts are tokenised once, and kept"),
}
TRAINING: dict[str, Entry] = {
    "output_dir": same("output_dir", default="trainer_output"),
    "overwrite_output_dir": same("overwrite_output_dir"),
    "seed": same("seed", default=42),
    "data_seed": absent("--seed is of the data's order, too"),
    "learning_rate": related(3e-6),  # since 0.29 (95cedba3)
    "weight_decay": same("actor_weight_decay", "critic_weight_decay"),
    **{name: related(value) for name, value in (("adam_beta1", 0.9), ("adam_beta2", 0.999), ("warmup_steps", 0))},
    "warmup_ratio": related(None),
    "adam_epsilon": dialect("eps"),
    "max_grad_norm": same("max_grad_norm", note="TRL's PPO clips under accelerate with DeepSpeed alone; here it does"),
    "lr_scheduler_type": same(
        "lr_scheduler_type",
        values={
            name: name for name in ("linear", "cosine", "constant", "constant_with_warmup", "cosine_with_restarts")
        },
        otherwise="take one of linear, cosine, constant",
    ),
    "lr_scheduler_kwargs": absent("schedules have no settings of their own here", {}, ""),
    "optim": same(
        values=dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
        otherwise="the optimizer is AdamW, or with --set optimizer=tf_adam TensorFlow's Adam",
    ),
    "per_device_train_batch_size": related(8),
    "gradient_accumulation_steps": related(1),
    "num_train_epochs": related(3),
    "max_steps": absent("TRL's PPO counts total_episodes; --max_steps counts steps here", -1),
    "bf16": related(None),
    "fp16": related(False),
    "gradient_checkpointing": same("actor_gradient_checkpointing", "critic_gradient_checkpointing", default=True),
    "gradient_checkpointing_kwargs": idle("how checkpointing is done changes no number"),
    "save_steps": same("save_steps", note="restart points; TRL writes models, with a default of 500"),
    "save_strategy": absent("restart points are written each --save_steps", "steps", "no"),
    "save_total_limit": same("keep_checkpoints"),
    "save_only_model": absent("restart points hold all that is needed to go on", False),
    "resume_from_checkpoint": absent("restart points are of another form: begin anew, from the model in it"),
    "eval_steps": idle("TRL's PPO generates num_sample_generations times; --eval_steps evaluates here"),
    "eval_strategy": idle("TRL's PPO generates num_sample_generations times; --eval_steps evaluates here"),
    "per_device_eval_batch_size": idle("held-out prompts are answered as the others are"),
    **dict.fromkeys(("logging_steps", "logging_strategy", "logging_first_step", "logging_dir"), METRICS),
    **dict.fromkeys(("report_to", "run_name", "disable_tqdm"), METRICS),
    "deepspeed": absent("--actor_ds_config and its like take DeepSpeed's JSON, a file an engine (configs/ds)"),
    "fsdp": absent("models are partitioned by ZeRO: --actor_zero_stage 3 --critic_zero_stage 3", "", []),
    **dict.fromkeys(("ddp_find_unused_parameters", "ddp_timeout", "local_rank"), LAUNCHED),
    "dataloader_num_workers": idle("prompts are tokenised before the run"),
    "remove_unused_columns": idle("columns that no reward function asks for are not read"),
    "torch_compile": absent("--decoding compile compiles generation; the rest is torch's own code", False),
    **{name: related(default) for name, default in (("push_to_hub", False), ("hub_model_id", None))},
    "hub_private_repo": related(None),
    "hub_token": absent("a token is not written into a file: hf auth login, or HF_TOKEN", secret=True),
}
TABLE: dict[str, Entry] = {**MODEL, **SCRIPT, **TRAINING, **PPO}
