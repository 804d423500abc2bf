"""The named dialects. Each row says where a system departs from `default`, or from the system it came out of.

Where a system trains policy and value head as one model (openai, trlx), its value gradient also moves the policy's
trunk; here actor and critic are two engines. Rewards, advantages, both losses and their gradients with respect to
log-probs and values are the system's all the same. group_table.py has those without a critic, but for TRL's old one.
"""

from engine.algorithms.dialect import Dialect
from engine.algorithms.group_table import GROUP_DIALECTS, GROUP_NOTES
from engine.errors import UserError

DEFAULT = Dialect()

# microsoft/DeepSpeedExamples 83757d9c, applications/DeepSpeed-Chat
DEEPSPEED_CHAT = Dialect(
    name="deepspeed_chat",
    temperature_in_logprobs=False,
    old_logprobs="forward",
    pad_token="eos_unless_llama",
    score_before_pad=True,  # `forward_value`: at the token before the first pad
    length_rule="not_pad",  # its masks are `ids != pad`, so EOS counts only where pad is another token
    reward_slots="one_past",  # the first pad slot holds a KL term, the score, and a value
    value_slots="one_past",
    score_slot="after_last",
    min_response_tokens=2,  # it drops shorter ones on their rank; here they are masked and counted
    whiten_advantages=False,
    loss_scope="micro_batch",
    ppo_epochs=1,
    actor_lr=9.65e-6,
    critic_lr=5e-6,
    lr_schedule="cosine",
    warmup_steps=100,
    warmup_from_zero=True,  # as transformers' schedules
    decay="deepspeed_chat",  # by the names of weights, which spare GPT-2's last norm alone
)

# the same, 1d17cf7c: just before pull request 620
DEEPSPEED_CHAT_2023 = DEEPSPEED_CHAT.override(
    name="deepspeed_chat_2023",
    kl_coef=0.02,
    sampling="without_eos",  # min_length = max_length
    reward_slots="all",  # nothing is zeroed after the end
    value_slots="all",
    score_slot="last",
)

# openai/lm-human-preferences cbfd210b, the sentiment and descriptiveness presets of its launch.py
OPENAI = Dialect(
    name="openai",
    kl_coef=0.15,
    kl_controller="adaptive",  # to the default target and horizon
    sampling="fixed",  # 24 tokens; EOS is one of them
    temperature=0.7,
    old_logprobs="sampler",
    query_start=".",  # start_text, end_text: whole sentences
    query_end=".",
    truncate_token=".",  # only the text that is scored; all tokens are trained
    truncate_after=16,
    length_rule="row",  # no mask anywhere, the score in the last column
    score_clip=None,
    missing_end="replace",
    missing_end_value=-1.0,
    advantages_at="mini_batch",  # whitened rewards, then GAE, within the loss
    whiten_rewards=True,
    whiten_over="rank",
    value_factor=0.1,
    lr_per="step",
    warmup_steps=0,
    optimizer="tf_adam",
    betas=(0.9, 0.999),
    eps=1e-5,
    max_grad_norm=0.0,
    critic_start="zero_head",  # of the policy's own trunk, there
)

# vwxyzjn/summarize_from_feedback_details ee77a9ab, ppo.py
SUMMARIZE = Dialect(
    name="summarize",
    kl_coef=0.05,
    sampling="fixed",  # 53 tokens, EOS does not stop
    temperature=0.7,
    temperature_offset=1e-7,  # against a division by 0
    old_logprobs="sampler",
    truncate_token="eos",
    pad_token="never_eos",  # "[PAD]", which it adds
    score_before_pad=True,  # `get_reward`, by `first_true_indices`
    length_rule="before_pad",  # of the text cut after EOS and padded
    score_slot="after_last",
    value_slots="one_past",
    value_loss_slots="one_past",  # its padding_mask_p1
    min_response_tokens=0,
    score_clip=None,
    missing_end="replace",
    missing_end_value=-1.0,
    whiten_over="rank",
    value_factor=0.1,
    loss_scope="micro_batch",  # of one response by default
    actor_lr=3e-6,
    critic_lr=3e-6,
    lr_per="step",
    warmup_steps=0,
    betas=(0.9, 0.999),
    eps=1e-5,
    actor_weight_decay=0.01,  # PyTorch's default for AdamW
    critic_weight_decay=0.01,
    decay="all",
    max_grad_norm=0.0,  # 1.0 under accelerate with DeepSpeed
)

# CarperAI/trlx 3340c2f3, its default PPO configuration
TRLX = Dialect(
    name="trlx",
    kl_coef=0.001,  # adaptive where the user sets a target; then by the next two
    kl_measure="exp_delta",
    kl_update="epoch",
    temperature_in_logprobs=False,
    old_logprobs="forward",
    pad_token="padding",
    length_rule="not_pad",  # its masks are `ids != pad`, and L their sum
    reward_slots="after_tokens",  # the mask of the state's token, and that of slot L is the last real one
    value_slots="two_past",
    score_slot="two_after",
    min_response_tokens=0,
    score_clip=10.0,
    score_order="clip_scale",  # scaling is off by default
    advantages_at="micro_batch",
    whiten_slots="row",  # no mask: padding counts as advantage 0
    whiten_variance="unbiased_alone",  # torch.var_mean without torch.distributed, a sum over n with it
    loss_scope="micro_batch_sum",  # of its minibatch_size, which is off by default: one micro-batch a step
    mini_batches=4,  # 128 rollouts, 32 each
    actor_lr=3e-5,
    critic_lr=3e-5,
    lr_schedule="constant",  # a cosine whose end is its start
    warmup_steps=0,
    actor_weight_decay=1e-6,
    critic_weight_decay=1e-6,
    decay="all",
    max_grad_norm=0.0,
    critic_start="zero_head",  # there two layers on the policy's trunk, drawn at random (`make_head`)
    hydra_layers=2,
)

# huggingface/trl f2cd5771, PPO, which came out of summarize
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
    score_slot="last",  # any: a response's rewards are summed
    value_slots="response",  # there are no values
    value_loss_slots="response",
    value_factor=1.0,
    actor_lr=5e-5,
    critic_lr=0.0,
    critic_start="none",
)

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
# Where a run is told how it departs from the system itself.
NOTES = {
    "openai": _ONE_TRUNK,
    "trlx": f"{_ONE_TRUNK}. Its head has two layers, drawn at random; here it is one of zeros",
    **GROUP_NOTES,
}


def get_dialect(name: str) -> Dialect:
    """The dialect of this name; raises UserError, listing the known ones."""
    if name not in DIALECTS:
        raise UserError(f"dialect {name!r}: known are {', '.join(DIALECTS)}.")
    return DIALECTS[name]
