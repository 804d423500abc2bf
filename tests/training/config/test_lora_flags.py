"""The flags of LoRA: which adapters they ask for, and what goes together."""

import pytest

from engine.algorithms import DIALECTS
from engine.errors import UserError
from engine.models.lora import LoraSpec
from tests.training.config.command_lines import parse
from training.config.step3 import RLHFFlags
from training.config.supervised import RewardFlags, SFTFlags


def spec(**fields) -> LoraSpec:
    """DeepSpeed-Chat's defaults, and these fields."""
    usual = {"alpha": 1.0, "targets": "all-linear", "dropout": 0.0, "lr": 5e-4, "only": False, "seed": 1234}
    return LoraSpec(**usual | fields)


def engines(*words: str, dialect: str = "default"):
    args = parse("--dialect", dialect, *words, flags_class=RLHFFlags)
    return args.spec


@pytest.mark.parametrize("flags_class", [SFTFlags, RewardFlags])
def test_adapters_of_steps_1_and_2(flags_class):
    def asked(*words: str):
        return parse(*words, flags_class=flags_class).lora()

    assert asked() is None and asked("--lora_dim", "0") is None
    assert asked("--lora_dim", "128", "--lora_module_name", "decoder.layers.") == spec(
        dim=128, targets="decoder.layers."
    )
    words = "--lora_dim 8 --lora_alpha 16 --lora_target_modules q_proj v_proj --lora_dropout 0.1 --seed 7"
    assert asked(*words.split(), "--only_optimize_lora", "--lora_learning_rate", "1e-3") == spec(
        dim=8, alpha=16.0, targets=("q_proj", "v_proj"), dropout=0.1, lr=1e-3, only=True, seed=7
    )


def test_adapters_of_step_3():
    found = engines(
        "--actor_lora_dim", "64", "--actor_lora_module_name", "layers.", "--actor_lora_learning_rate", "1e-4"
    )
    assert found.actor_lora == spec(dim=64, targets="layers.", lr=1e-4) and found.critic_lora is None
    found = engines("--critic_lora_dim", "2", "--lora_target_modules", "all-linear")
    assert found.actor_lora is None and found.critic_lora == spec(dim=2)


def test_an_output_head_beside_all_linear_is_the_actors():
    """A critic has none, and all its other linear layers have factors."""
    found = engines("--actor_lora_dim", "4", "--critic_lora_dim", "2", "--lora_target_modules", "all-linear", "lm_head")
    assert found.actor_lora == spec(dim=4, targets=("all-linear", "lm_head"))
    assert found.critic_lora == spec(dim=2)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_has_adapters(dialect):
    critic = DIALECTS[dialect].has_critic
    words = ["--actor_lora_dim", "4", *(["--critic_lora_dim", "8"] if critic else []), "--set", "hydra_layers=0"]
    words += ["--reward_model_name_or_path", "reward"]  # which the critic's path names, too
    found = engines(*words, "--actor_learning_rate", "1e-6", dialect=dialect)
    assert found.actor_lora == spec(dim=4) and found.critic_lora == (spec(dim=8) if critic else None)


STEP_3 = {
    "--actor_lora_dim -1": "--actor_lora_dim -1: must be at least 0.",
    "--only_optimize_lora": "--only_optimize_lora needs --actor_lora_dim or --critic_lora_dim. Give that",
    "--lora_alpha 2": "--lora_alpha 2.0 needs --actor_lora_dim or --critic_lora_dim",
    "--lora_target_modules q_proj v_proj": "--lora_target_modules q_proj v_proj needs --actor_lora_dim or",
    "--critic_lora_dim 4 --actor_lora_module_name x": "--actor_lora_module_name x needs --actor_lora_dim. Give that",
    "--actor_lora_learning_rate 0": "--actor_lora_learning_rate 0.0 needs --actor_lora_dim",
    "--actor_lora_dim 4 --lora_alpha 0": "--lora_alpha 0.0: must be greater than 0.",
    "--actor_lora_dim 4 --lora_dropout 0.1": "--lora_dropout 0.1: PPO compares the probabilities",
    "--actor_lora_dim 4 --lora_target_modules x --actor_lora_module_name y": "--actor_lora_module_name y and "
    "--lora_target_modules x say the same.",
    "--actor_lora_dim 4 --actor_learning_rate 0": "--actor_learning_rate 0 with --actor_lora_dim 4: the rate of the",
    "--critic_lora_dim 4 --set critic_lr=0": "--critic_learning_rate 0 with --critic_lora_dim 4: the rate of the",
    "--actor_lora_dim 4 --set hydra_layers=1": "--actor_lora_dim 4 with hydra_layers 1 (dialect default): a hydra's",
    "--critic_lora_dim 4 --dialect trl_rloo": "--critic_lora_dim 4: the dialect trl_rloo has no critic.",
    "--share_trunk": "--share_trunk needs --only_optimize_lora and --actor_lora_dim",
    "--actor_lora_dim 4 --only_optimize_lora --share_trunk --set critic_lr=0": "--critic_learning_rate 0 with "
    "--share_trunk: the rate of the factors",
    "--enable_mixed_precision_lora": "--enable_mixed_precision_lora: it rounds the frozen weights to 8 bits",
}
STEP_1 = {
    "--lora_dim -1": "--lora_dim -1: must be at least 0.",
    "--only_optimize_lora": "--only_optimize_lora needs --lora_dim. Give that",
    "--lora_dropout 0.1": "--lora_dropout 0.1 needs --lora_dim",
    "--lora_dim 4 --lora_dropout 1": "--lora_dropout 1.0: must be less than 1.",
    "--lora_dim 4 --learning_rate 0": "--learning_rate 0 with --lora_dim 4: the rate of the factors",
}


@pytest.mark.parametrize(
    "flags_class, words, message",
    [(RLHFFlags, *case) for case in STEP_3.items()] + [(SFTFlags, *case) for case in STEP_1.items()],
)
def test_what_does_not_go_together_is_refused(flags_class, words, message):
    with pytest.raises(UserError) as caught:
        args = parse(*words.split(), flags_class=flags_class)
        _ = args.spec
    assert str(caught.value).startswith(message)
