"""What each critic-free system's source says, literally: its departures from DeepSpeed-Chat's row, in every field."""

# Of all of them: what DeepSpeed-Chat alone has, and that there is no critic.
SHARED = {
    "temperature_in_logprobs": True,
    "score_before_pad": False,
    "pad_token": "tokenizer",
    "length_rule": "sampled",
    "kl_positions": "response",
    "value_positions": "response",
    "score_position": "last",
    "ppo_epochs": 1,
    "mini_batches": 1,
    "loss_scope": "optimizer_step",
    "critic_lr": 0.0,
    "critic_start": "none",
    "decay": "matrices",
    "max_grad_norm": 1.0,
}
GRPO = SHARED | {
    "kl_coef": 0.04,
    "kl_estimator": "k3",
    "kl_in": "loss",
    "samples_per_prompt": 64,
    "min_response_tokens": 1,
    "score_clip": None,
    "advantage_estimator": "grpo",
    "advantage_scale": "group",
    "scale_eps": 1e-6,
    "loss_scope": "response",
    "actor_lr": 1e-6,
    "lr_schedule": "constant",
    "warmup_steps": 0,
    "warmup_from_zero": False,
}
TRL = SHARED | {
    "samples_per_prompt": 8,
    "min_response_tokens": 0,
    "score_clip": None,
    "actor_lr": 1e-6,
    "lr_schedule": "linear",
    "warmup_steps": 0,
    "warmup_from_zero": False,
    "betas": (0.9, 0.999),
}
GRPO_TRL = TRL | {
    "kl_coef": 0.0,
    "kl_estimator": "k3",
    "kl_in": "loss",
    "kl_times_ratio": True,
    "advantage_estimator": "grpo",
    "advantage_scale": "group",
    "scale_eps": 1e-4,
}
OPENRLHF = SHARED | {
    "min_response_tokens": 0,
    "whiten_advantages": True,
    "lr_schedule": "cosine",
    "warmup_from_zero": True,
    "betas": (0.9, 0.95),
}
GROUPS = {
    "grpo": GRPO,
    "grpo_trl": GRPO_TRL,
    "dr_grpo": GRPO
    | {
        "kl_coef": 0.0,
        "samples_per_prompt": 8,
        "min_response_tokens": 0,
        "missing_end": "replace",
        "missing_end_value": 0.0,
        "advantage_scale": "none",
        "loss_scope": "fixed_length",
        "mini_batches": 8,
        "betas": (0.9, 0.95),
    },
    "dapo": GRPO
    | {
        "kl_coef": 0.0,
        "samples_per_prompt": 16,
        "dynamic_sampling": 10,
        "overlong_buffer": 0.2,
        "min_response_tokens": 0,
        "clip_range": 0.2,
        "clip_range_high": 0.28,
        "loss_scope": "optimizer_step",
        "mini_batches": 16,
        "lr_schedule": "constant_with_warmup",
        "warmup_steps": 10,
        "warmup_from_zero": True,
        "betas": (0.9, 0.999),
        "actor_weight_decay": 0.1,
        "decay": "all",
    },
    "gspo": GRPO_TRL | {"ratio": "response_mean", "clip_range": 3e-4, "clip_range_high": 4e-4, "mini_batches": 4},
    "cispo": GRPO_TRL | {"surrogate": "cispo", "clip_range": 1.0, "clip_range_high": 4.0, "mini_batches": 16},
    "sapo": GRPO_TRL | {"surrogate": "sapo", "loss_scope": "response", "mini_batches": 4},
    "reinforce_pp": OPENRLHF
    | {
        "kl_coef": 0.01,
        "score_clip": 10.0,
        "advantage_estimator": "reinforce",
        "mini_batches": 8,
        "actor_lr": 1e-6,
        "warmup_steps": 23,
    },
    "reinforce_pp_baseline": OPENRLHF
    | {
        "kl_coef": 1e-5,
        "kl_estimator": "k2",
        "kl_in": "loss",
        "samples_per_prompt": 8,
        "score_clip": None,
        "advantage_estimator": "reinforce_baseline",
        "actor_lr": 5e-7,
        "warmup_steps": 30,
    },
    "rloo": TRL
    | {"kl_coef": 0.05, "samples_per_prompt": 2, "advantage_estimator": "rloo", "scale_eps": 1e-4, "ratio": "response"},
}
