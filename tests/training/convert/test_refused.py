"""Step 3 takes what is converted: commands as they are given to OpenRLHF, of every estimator, parsed and resolved."""

import pytest

from engine.algorithms import check
from engine.errors import UserError
from training.convert.__main__ import convert
from training.convert.openrlhf import DIALECTS
from training.flags.parsing import parse_flags
from training.flags.rlhf_arguments import RLHFFlags

SCRIPT = """python3 -m openrlhf.cli.train_ppo_ray --pretrain sft --save_path out/ppo --prompt_data org/a \\
   --input_key prompt --actor_num_nodes 1 --actor_num_gpus_per_node 8 --critic_num_gpus_per_node 8 \\
   --colocate_all_models --advantage_estimator {estimator} --n_samples_per_prompt 8 --micro_train_batch_size 8 \\
   --micro_rollout_batch_size 16 --rollout_batch_size 128 --prompt_max_len 1024 --generate_max_len 1024 \\
   --zero_stage 3 --bf16 --gradient_checkpointing --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 \\
   --gamma 1.0 --lambd 0.95 --value_clip 0.2 --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 {more}
"""
REWARD = "--reward_pretrain reward --train_batch_size 128"
MORE = {
    "plain": REWARD,
    "one update a rollout": f"{REWARD.replace('128', '1024')} --eps_clip_low_high 0.2 0.28 --dual_clip 3",
    "clipping": f"{REWARD} --eps_clip_low_high 0.2 0.28 --dual_clip 3 --max_epochs 2",
    "one clip range, and a dual clip below it": f"{REWARD} --eps_clip_low_high 0.2 0.2 --dual_clip 1.1",
    "a critic's": f"{REWARD} --freezing_actor_steps 3 --l2 0.01 --adam_offload",
    "adapters": f"{REWARD} --lora_rank 16 --ref_reward_offload",
    "a server": "--remote_rm_url http://a:5000/get_reward --ref_reward_offload --train_batch_size 128",
    "kl": f"{REWARD} --kl_target 6 --kl_horizon 5000 --ref_reward_offload",
    "no kl": f"{REWARD} --kl_target 6 --init_kl_coef=0",
    "a long answer": f"{REWARD} --overlong_buffer_len 256 --overlong_penalty_factor 0.5 --enable_vllm_is_correction",
    "no long answer": f"{REWARD} --overlong_penalty_factor 0.5 --zero_stage=0 --adam_offload",
}


def written(folder, estimator: str, more: str) -> str:
    text = SCRIPT.format(estimator=estimator, more=more)
    for given in ("--init_kl_coef 1e-3", "--zero_stage 3"):
        if given.split()[0] + "=" in more:  # of which a command has one
            text = text.replace(given, "")
    path = folder / "train.sh"
    path.write_text(text)
    return str(path)


def taken(folder, estimator: str, more: str) -> tuple[RLHFFlags, str]:
    """The flags as step 3 parses them, and the file; raises UserError as step 3 does before it looks at models."""
    text, _ = convert("openrlhf", written(folder, estimator, more))
    (folder / "run.yaml").write_text(text)
    args = parse_flags(RLHFFlags, ["--config", str(folder / "run.yaml")], "a program")
    dialect, _ = args.resolved_dialect()
    args.engine_configs(dialect)
    check(
        dialect,
        rows_per_rank=args.rows_per_rank,
        mini_batches=dialect.mini_batches,
        micro_batch_size=args.per_device_training_batch_size,
        ranks=8,
        layers=32,
        given=args.given_fields(),
    )
    return args, text


@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
@pytest.mark.parametrize("estimator, dialect", DIALECTS.items())
def test_every_estimators_command_is_taken(estimator, dialect, more, tmp_path):
    args, _ = taken(tmp_path, estimator, more)
    assert args.dialect == dialect and args.actor_zero_stage == (0 if "stage=0" in more else 3)
    assert args.kl_coef == (0.0 if "coef=0" in more else 0.001) and args.samples_per_prompt == 8
    assert bool(args.critic_zero_stage) == (estimator == "gae" and "stage=0" not in more)
    assert (args.gamma is not None) == (estimator in ("gae", "reinforce"))


def test_what_is_left_out_is_told(tmp_path):
    _, text = taken(tmp_path, "group_norm", MORE["one update a rollout"])
    for line in (
        "critic_zero_stage (zero_stage 3): the dialect grpo has no critic",
        "critic_gradient_checkpointing (gradient_checkpointing true): the dialect grpo has no critic",
        "gamma (gamma 1.0): the dialect grpo has no critic, nor a discount",
        "dual_clip (dual_clip 3): there is one optimizer step a rollout, in which every ratio is 1",
    ):
        assert f"#   {line}" in text
    _, missing = convert("openrlhf", written(tmp_path, "gae", MORE["one clip range, and a dual clip below it"]))
    assert "dual_clip (dual_clip 1.1): it is for ratios that clipping leaves alone, over 1.2. Give more" in str(missing)


def test_what_has_an_effect_stays(tmp_path):
    args, _ = taken(tmp_path, "gae", MORE["clipping"])
    dialect, _ = args.resolved_dialect()
    assert (dialect.clip_range, dialect.clip_range_high, dialect.dual_clip) == (0.2, 0.28, 3.0)
    args, _ = taken(tmp_path, "reinforce", MORE["kl"])
    assert args.resolved_dialect()[0].kl_target == 6.0 and args.offload_reward_model and args.offload_reference_model
    args, _ = taken(tmp_path, "gae", MORE["adapters"])
    assert not args.offload_reference_model and not args.offload_reward_model and args.critic_lora_dim == 16
    args, _ = taken(tmp_path, "rloo", MORE["adapters"])
    assert args.offload_reward_model and not args.critic_lora_dim


def test_one_response_a_prompt_is_no_group(tmp_path):
    path = written(tmp_path, "rloo", REWARD)
    (tmp_path / "train.sh").write_text((tmp_path / "train.sh").read_text().replace("per_prompt 8", "per_prompt 1"))
    with pytest.raises(UserError, match="n_samples_per_prompt 1: advantage_estimator rloo compares the responses"):
        convert("openrlhf", path)
