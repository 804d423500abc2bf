"""The named dialects. Each entry lists the differences of a system from `default`, or from the system that it derives
from.

Two systems, openai and trlx, train policy and value head as one model, in which the gradient of the value loss also
changes the policy's layers. Here actor and critic are two engines. Rewards, advantages, both losses, and the gradients
of the losses with respect to log-probs and values still equal the system's. The dialects without a critic come last;
docs/without_critic.md says what they compute, and when to choose one.
"""

from engine.algorithms.dialect import Dialect
from engine.errors import UserError

DEFAULT = Dialect()

# microsoft/DeepSpeedExamples 83757d9c, applications/DeepSpeed-Chat
DEEPSPEED_CHAT = Dialect(
    name="deepspeed_chat",
    temperature_in_logprobs=False,
    old_logprobs="forward",
    pad_token="eos_unless_llama",
    score_before_pad=True,  # `forward_value`: at the token before the first pad
    length_rule="not_pad",  # its masks are `ids != pad`, so EOS counts only if the pad token is another
    kl_positions="one_past",  # the first pad position holds a KL term, the score, and a value
    value_positions="one_past",
    score_position="after_last",
    min_response_tokens=2,  # it drops shorter responses; here they are masked and counted
    whiten_advantages=False,
    loss_scope="micro_batch",
    ppo_epochs=1,
    actor_lr=9.65e-6,
    critic_lr=5e-6,
    lr_schedule="cosine",
    warmup_steps=100,
    warmup_from_zero=True,  # as transformers' schedules
    decay="deepspeed_chat",  # chosen by weights' names; of GPT-2's norms only the last is spared
)

# microsoft/DeepSpeedExamples 1d17cf7c, the commit just before pull request 620
DEEPSPEED_CHAT_2023 = DEEPSPEED_CHAT.override(
    name="deepspeed_chat_2023",
    kl_coef=0.02,
    sampling="without_eos",  # min_length = max_length
    kl_positions="all",  # nothing is zeroed after the end
    value_positions="all",
    score_position="last",
)

# openai/lm-human-preferences cbfd210b, the sentiment and descriptiveness presets of its launch.py
OPENAI = Dialect(
    name="openai",
    kl_coef=0.15,
    kl_controller="adaptive",  # with the default target and horizon
    sampling="fixed",  # 24 tokens; EOS is one of them
    temperature=0.7,
    old_logprobs="sampler",
    query_start=".",  # start_text, end_text: whole sentences
    query_end=".",
    truncate_token=".",  # cuts only the text that is scored; all tokens are learned
    truncate_after=16,
    length_rule="row",  # no mask anywhere, the score in the last column
    score_clip=None,
    missing_end="replace",
    missing_end_value=-1.0,
    advantages_at="mini_batch",  # the loss function whitens rewards, then computes GAE
    whiten_rewards=True,
    whiten_over="rank",
    value_factor=0.1,
    lr_per="step",
    warmup_steps=0,
    optimizer="tf_adam",
    betas=(0.9, 0.999),
    eps=1e-5,
    max_grad_norm=0.0,
    critic_start="zero_head",  # that system puts the head on the policy's own layers
)

# vwxyzjn/summarize_from_feedback_details ee77a9ab, ppo.py
SUMMARIZE = Dialect(
    name="summarize",
    kl_coef=0.05,
    sampling="fixed",  # 53 tokens; sampling goes on after EOS
    temperature=0.7,
    temperature_offset=1e-7,  # against a division by 0
    old_logprobs="sampler",
    truncate_token="eos",
    pad_token="never_eos",  # "[PAD]", which it adds
    score_before_pad=True,  # `get_reward`, by `first_true_indices`
    length_rule="before_pad",  # in the text that was cut after EOS and padded
    score_position="after_last",
    value_positions="one_past",
    value_loss_positions="one_past",  # its padding_mask_p1
    min_response_tokens=0,
    score_clip=None,
    missing_end="replace",
    missing_end_value=-1.0,
    whiten_over="rank",
    value_factor=0.1,
    loss_scope="micro_batch",  # a micro-batch has one response by default
    actor_lr=3e-6,
    critic_lr=3e-6,
    lr_per="step",
    warmup_steps=0,
    betas=(0.9, 0.999),
    eps=1e-5,
    actor_weight_decay=0.01,  # PyTorch's default for AdamW
    critic_weight_decay=0.01,
    decay="all",
    max_grad_norm=0.0,  # 1.0 when run with accelerate and DeepSpeed
)

# CarperAI/trlx 3340c2f3, its default PPO configuration
TRLX = Dialect(
    name="trlx",
    kl_coef=0.001,  # adaptive if the user sets a target; only then do the next two fields count
    kl_measure="exp_delta",
    kl_update="epoch",
    temperature_in_logprobs=False,
    old_logprobs="forward",
    pad_token="padding",
    length_rule="not_pad",  # its masks are `ids != pad`; a response's length is their sum
    kl_positions="after_tokens",  # uses the mask of the token before each position
    value_positions="two_past",
    score_position="two_after",
    min_response_tokens=0,
    score_clip=10.0,
    score_order="clip_scale",  # scaling is off by default
    advantages_at="micro_batch",
    whiten_positions="row",  # whitening has no mask: padding counts as advantage 0
    whiten_variance="unbiased_alone",  # n - 1 (torch.var_mean) in one process, n with torch.distributed
    loss_scope="micro_batch_sum",  # a micro-batch is its minibatch_size; off by default
    mini_batches=4,  # 128 rollouts, 32 in each mini-batch
    actor_lr=3e-5,
    critic_lr=3e-5,
    lr_schedule="constant",  # its cosine ends at the rate at which it starts
    warmup_steps=0,
    actor_weight_decay=1e-6,
    critic_weight_decay=1e-6,
    decay="all",
    max_grad_norm=0.0,
    critic_start="zero_head",  # its head has two random layers on the policy's trunk (`make_head`)
    hydra_layers=2,
)

# huggingface/trl f2cd5771, its PPO trainer, which was derived from summarize_from_feedback_details
TRL_PPO = SUMMARIZE.override(
    name="trl_ppo",
    truncate_token="",  # stop_token is off by default
    missing_end="none",  # missing_eos_penalty is off by default; it would be "subtract"
    missing_end_value=0.0,
    whiten_variance="unbiased",
    eps=1e-8,
    actor_weight_decay=0.0,
    critic_weight_decay=0.0,
)

# huggingface/trl v0.11.0, RLOO
TRL_RLOO = TRL_PPO.override(
    name="trl_rloo",
    samples_per_prompt=2,  # rloo_k
    advantage_estimator="rloo",
    ratio="response",
    whiten_advantages=False,  # came with 0.14
    score_position="last",  # any position would do: a response's rewards are summed
    value_positions="response",  # there are no values
    value_loss_positions="response",
    value_factor=1.0,
    actor_lr=5e-5,
    critic_lr=0.0,
    critic_start="none",
)

# Dialects without a critic. Most compare the responses to one prompt with each other. A dialect with
# `min_response_tokens=0` also counts responses without a learned token, as its source does.

# Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300v3), equations 3 and 4, sections 4.1.2 and 4.2
# The value of scale_eps, and the division of squared deviations by n - 1, are those of verl 0.9.1,
# trainer/ppo/core_algos.py, `compute_grpo_outcome_advantage`.
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
    scale_eps=1e-6,
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
    missing_end="replace",  # the score becomes 0
    advantage_scale="none",
    loss_scope="fixed_length",  # generate_max_length
    mini_batches=8,  # 128 x 8 responses, 128 in each mini-batch
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
    mini_batches=16,  # 512 prompts, 32 in each mini-batch
    lr_schedule="constant_with_warmup",
    warmup_steps=10,
    warmup_from_zero=True,
    betas=(0.9, 0.999),
    actor_weight_decay=0.1,
    decay="all",
)

# Zheng et al. 2025, "Group sequence policy optimization" (arXiv 2507.18071v2), equations 5 to 7, section 5.1; and the
# settings for it in TRL's docs/source/paper_index.md: importance_sampling_level "sequence", loss_type "grpo"
GSPO = GRPO_TRL.override(
    name="gspo",
    ratio="response_mean",
    clip_range=3e-4,
    clip_range_high=4e-4,
    mini_batches=4,
)

# MiniMax 2025, "MiniMax-M1" (arXiv 2506.13585), equations 4 and 5, section 3.1; and TRL's settings for it: loss_type
# "cispo", epsilon_high 5
CISPO = GRPO_TRL.override(
    name="cispo",
    surrogate="cispo",
    clip_range=1.0,  # no lower bound
    clip_range_high=4.0,  # the paper names no number
    mini_batches=16,  # off-policy updates of a rollout in the paper's section 3.1
)

# Gao et al. 2025, "Soft adaptive policy optimization" (arXiv 2511.20347), equation 5, section 5; and for it TRL's
# loss_type "sapo", sapo_temperature_pos 1, sapo_temperature_neg 1.05
SAPO = GRPO_TRL.override(name="sapo", surrogate="sapo", loss_scope="response", mini_batches=4)

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
    mini_batches=8,  # 1024 responses, 128 in each mini-batch
    actor_lr=1e-6,
    critic_lr=0.0,
    lr_schedule="cosine",
    warmup_steps=23,  # 3 % of the optimizer steps of the README's run
    warmup_from_zero=True,
    critic_start="none",
)

# OpenRLHF's reinforce_baseline, as OpenRLHF 0b08e353 runs it:
# examples/scripts/train_reinforce_baseline_hybrid_engine.sh
REINFORCE_PP_BASELINE = REINFORCE_PP.override(
    name="reinforce_pp_baseline",
    kl_coef=1e-5,
    kl_estimator="k2",
    kl_in="loss",
    samples_per_prompt=8,
    advantage_estimator="reinforce_baseline",
    mini_batches=1,  # 128 x 8 responses, all in one mini-batch
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

GROUP_DIALECTS = (GRPO, GRPO_TRL, DR_GRPO, DAPO, GSPO, CISPO, SAPO, REINFORCE_PP, REINFORCE_PP_BASELINE, RLOO)

DIALECTS = {
    dialect.name: dialect
    for dialect in (
        *(DEFAULT, DEEPSPEED_CHAT, DEEPSPEED_CHAT_2023, OPENAI, SUMMARIZE, TRLX, TRL_PPO, TRL_RLOO),
        *GROUP_DIALECTS,
    )
}

_ONE_TRUNK = (
    "its system has the value head on the policy's trunk, which the value gradient moves too; here actor and "
    "critic are two engines, and it does not"
)
_OPENRLHF = (
    "its learning rate falls to a tenth of the peak; here to 0. It clamps each token's log-ratio to plus or minus 20 "
    "and its KL to plus or minus 10, which is not done here"
)
# How a dialect departs from the system that it is named after. A run with the dialect prints these notes.
NOTES = {
    "openai": _ONE_TRUNK,
    "trlx": f"{_ONE_TRUNK}. Its head has two layers, drawn at random; here it is one of zeros",
    "grpo": "the paper leaves open the clip range, the temperature and Adam's settings, which are the usual ones here, "
    "and which deviation it is (over n - 1, plus 1e-6, as verl has it). It renews its reference, which stays here",
    "grpo_trl": "with several mini_batches its loss is divided by their mean number of tokens, here by each one's own",
    "dr_grpo": "oat cuts the ratios of the actor to its sampler, vLLM, at 2; here that is correction=token_truncate",
    "dapo": "the code that it was published with takes a mean of micro-batches' means; here the loss is the paper's, a "
    "mean over all tokens of an optimizer step. It draws three times a step's prompts at once, and ends the run where "
    "ten such batches have too few groups that differ; here a batch is a step's, which goes on with what it has",
    "gspo": "the paper names no group size and no learning rate; these are TRL's",
    "cispo": "the paper names no bound of the ratio, no group size and no learning rate; these are TRL's. The paper "
    "also draws until scores differ and penalises length, as DAPO: here dynamic_sampling=10 overlong_buffer=0.2",
    "sapo": "the group size and the learning rate are TRL's",
    "reinforce_pp": _OPENRLHF,
    "reinforce_pp_baseline": f"{_OPENRLHF}. It clips scores less their group's mean to plus or minus 10, which is not "
    "done here. With kl_in 'reward' its group's mean is without the KL; here it would be with it. Its script also "
    "leaves groups of equal scores out and takes IcePop for its sampler, vLLM; here these are dynamic_sampling=10 and "
    "correction=token_mask correction_min=0.5 correction_max=5",
}


def get_dialect(name: str) -> Dialect:
    """The dialect with this name; raises UserError, which lists the known names, if there is none."""
    if name not in DIALECTS:
        raise UserError(f"dialect {name!r}: known are {', '.join(DIALECTS)}.")
    return DIALECTS[name]
