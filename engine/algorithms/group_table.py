"""The named dialects without a critic, most of which compare the responses to one prompt with each other.

What each computes, and when to take which, is in docs/dialects.md. All responses count, also those of which no token is
learned (`min_response_tokens=0`), where the source has it so.
"""

from engine.algorithms.dialect import Dialect

# Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300v3), equations 3 and 4, sections 4.1.2 and 4.2
GRPO = Dialect(
    name="grpo",
    kl_coef=0.04,
    kl_estimator="k3",
    kl_in="loss",
    old_logprobs="forward",
    samples_per_prompt=64,
    score_clip=None,
    advantage_estimator="grpo",
    advantage_scale="group",
    scale_eps=1e-6,  # verl 0.9.1, trainer/ppo/core_algos.py, `compute_grpo_outcome_advantage`; n - 1 as there, too
    whiten_advantages=False,
    loss_scope="response",
    ppo_epochs=1,  # "a single update following each exploration stage"
    actor_lr=1e-6,
    critic_lr=0.0,
    lr_schedule="constant",
    warmup_steps=0,
    critic_start="none",
)

# huggingface/trl 1.16.0, trl/trainer/grpo_trainer.py and grpo_config.py
GRPO_TRL = GRPO.override(
    name="grpo_trl",
    kl_coef=0.0,  # beta
    kl_times_ratio=True,  # use_bias_correction_kl
    samples_per_prompt=8,  # num_generations
    min_response_tokens=0,
    scale_eps=1e-4,
    loss_scope="optimizer_step",  # loss_type "dapo"; its "grpo", "bnpo", "dr_grpo": response, micro_batch, fixed_length
    lr_schedule="linear",
    betas=(0.9, 0.999),
)

# sail-sg/understand-r1-zero 14046dca, train_zero_math.py, examples/qwen2.5-math-1.5b.sh; sail-sg/oat 08379c61, ppo.py;
# Liu et al. 2025, "Understanding R1-Zero-like training" (arXiv 2503.20783), section 3.2
DR_GRPO = GRPO.override(
    name="dr_grpo",
    kl_coef=0.0,
    samples_per_prompt=8,
    min_response_tokens=0,
    missing_end="replace",  # by 0
    advantage_scale="none",
    loss_scope="fixed_length",  # generate_max_length
    mini_batches=8,  # 128 x 8 responses, 128 each
)

# Yu et al. 2025, "DAPO" (arXiv 2503.14476), equations 8 and 13, section 3.2; volcengine/verl 03150d4f,
# recipe/dapo/run_dapo_qwen2.5_32b.sh
DAPO = GRPO.override(
    name="dapo",
    kl_coef=0.0,
    samples_per_prompt=16,
    dynamic_sampling=10,  # max_num_gen_batches
    min_response_tokens=0,
    overlong_buffer=0.2,  # 4096 of 20480 tokens
    clip_range_high=0.28,
    loss_scope="optimizer_step",
    mini_batches=16,  # 512 prompts, 32 each
    lr_schedule="constant_with_warmup",
    warmup_steps=10,
    warmup_from_zero=True,
    betas=(0.9, 0.999),
    actor_weight_decay=0.1,
    decay="all",
)

# Zheng et al. 2025, "Group sequence policy optimization" (arXiv 2507.18071v2), equations 5 to 7, section 5.1; as
# docs/source/paper_index.md of TRL sets its GRPO up for it: importance_sampling_level "sequence", loss_type "grpo"
GSPO = GRPO_TRL.override(
    name="gspo",
    ratio="response_mean",
    clip_range=3e-4,
    clip_range_high=4e-4,
    mini_batches=4,
)

# OpenRLHF 0.11.2, --algo.advantage.estimator reinforce: trainer/ppo_utils/experience_maker.py, models/loss.py, and the
# defaults of cli/train_ppo_ray.py; Hu et al. 2025, "REINFORCE++" (arXiv 2501.03262)
REINFORCE_PP = Dialect(
    name="reinforce_pp",
    kl_coef=0.01,
    old_logprobs="forward",
    min_response_tokens=0,
    score_clip=10.0,  # reward.clip_range
    advantage_estimator="reinforce",
    ppo_epochs=1,
    mini_batches=8,  # 1024 responses, 128 each
    actor_lr=1e-6,
    critic_lr=0.0,
    lr_schedule="cosine",
    warmup_steps=23,  # 3 % of the optimizer steps of the README's run
    warmup_from_zero=True,
    critic_start="none",
)

# the same, reinforce_baseline, as OpenRLHF 0b08e353 runs it: examples/scripts/train_reinforce_baseline_hybrid_engine.sh
REINFORCE_PP_BASELINE = REINFORCE_PP.override(
    name="reinforce_pp_baseline",
    kl_coef=1e-5,
    kl_estimator="k2",
    kl_in="loss",
    samples_per_prompt=8,
    advantage_estimator="reinforce_baseline",
    mini_batches=1,  # 128 x 8 responses, all in one
    actor_lr=5e-7,
    warmup_steps=30,
).replaced(score_clip=None)

# huggingface/trl 1.16.0, trl/trainer/rloo_trainer.py and rloo_config.py
RLOO = GRPO_TRL.override(
    name="rloo",
    kl_coef=0.05,
    kl_estimator="k1",
    kl_in="reward",
    kl_times_ratio=False,
    samples_per_prompt=2,
    advantage_estimator="rloo",
    advantage_scale="none",
    ratio="response",
)

GROUP_DIALECTS = (GRPO, GRPO_TRL, DR_GRPO, DAPO, GSPO, REINFORCE_PP, REINFORCE_PP_BASELINE, RLOO)

_OPENRLHF = (
    "its learning rate falls to a tenth of the peak; here to 0. It clamps each token's log-ratio to plus or minus 20 "
    "and its KL to plus or minus 10, which is not done here"
)
# Where a run is told how it departs from the system itself.
GROUP_NOTES = {
    "grpo": "the paper leaves open the clip range, the temperature and Adam's settings, which are the usual ones here, "
    "and which deviation it is (over n - 1, plus 1e-6, as verl has it). It renews its reference, which stays here",
    "grpo_trl": "with several mini_batches its loss is divided by their mean number of tokens, here by each one's own",
    "dr_grpo": "oat cuts the ratios of the actor to its sampler, vLLM, at 2; here that is correction=token_truncate",
    "dapo": "the code that it was published with takes a mean of micro-batches' means; here the loss is the paper's, a "
    "mean over all tokens of an optimizer step. It draws three times a step's prompts at once, and ends the run where "
    "ten such batches have too few groups that differ; here a batch is a step's, which goes on with what it has",
    "gspo": "the paper names no group size and no learning rate; these are TRL's",
    "reinforce_pp": _OPENRLHF,
    "reinforce_pp_baseline": f"{_OPENRLHF}. It clips scores less their group's mean to plus or minus 10, which is not "
    "done here. With kl_in 'reward' its group's mean is without the KL; here it would be with it. Its script also "
    "leaves groups of equal scores out and takes IcePop for its sampler, vLLM; here these are dynamic_sampling=10 and "
    "correction=token_mask correction_min=0.5 correction_max=5",
}
