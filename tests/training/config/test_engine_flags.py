"""What the flags and the dialect make of the engines, and which flags contradict the dialect."""

import pytest

from engine.algorithms import get_dialect
from engine.errors import UserError
from training.config.step3 import RLHFFlags
from training.config.supervised import RewardFlags

HYDRA = {"set": ["hydra_layers=2"]}
FUNCTION = {"critic_model_name_or_path": None, "reward_function": "module:function"}


def flags(**given) -> RLHFFlags:
    return RLHFFlags(
        **(
            {
                "output_dir": "out",
                "data_path": ["d"],
                "actor_model_name_or_path": "sft",
                "critic_model_name_or_path": "rm",
            }
            | given
        )
    )


def roles(args) -> dict[str, int]:
    return {choice.role: choice.stage for choice in args.spec.engine_configs}


def test_a_critic_starts_as_the_dialect_says():
    for name, critic in (("default", "rm"), ("openai", None), ("trl_rloo", None)):
        spec = flags(dialect=name).spec
        assert (spec.critic_path, spec.reward_path, spec.with_reward_model) == (critic, "rm", True)
        assert spec.with_critic == (name != "trl_rloo")
    assert flags(reward_model_name_or_path="other").spec.critic_path == "rm"
    spec = flags(**FUNCTION).spec
    assert spec.critic_path is None and spec.with_critic and not spec.with_reward_model


def test_engines_of_each_kind_of_dialect():
    assert roles(flags(actor_zero_stage=3)) == {
        "actor": 3,
        "critic": 0,
        "reference": 3,
        "reward": 0,
    }
    assert roles(flags(actor_zero_stage=3, dialect="trl_rloo")) == {"actor": 3, "reference": 3, "reward": 3}
    assert roles(flags(actor_zero_stage=3, **HYDRA)) == {"actor": 3, "critic": 0, "reward": 0}
    assert list(flags(dialect="trl_rloo").ds_configs) == ["actor", "reference", "reward"]
    clipped = {role: config["gradient_clipping"] for role, config in flags(**HYDRA).ds_configs.items()}
    assert clipped == {"actor": 1.0, "critic": 1.0, "reward": 0.0}


LORA = {"actor_lora_dim": 4, "critic_lora_dim": 4, "only_optimize_lora": True}
OFF = "the reference is the actor with its adapters off"
HEAD = "the reward model is the critic with its adapters off and its first head"


@pytest.mark.parametrize(
    "dialect, given, engines, shared",
    [
        ("default", {}, {"actor": 3, "critic": 2}, [OFF, HEAD]),
        ("default", {"only_optimize_lora": False}, {"actor": 3, "critic": 2, "reference": 3, "reward": 0}, []),
        ("default", {"critic_lora_dim": 0}, {"actor": 3, "critic": 2, "reward": 0}, [OFF]),
        ("default", {"actor_lora_dim": 0}, {"actor": 3, "critic": 2, "reference": 3}, [HEAD]),
        ("default", {"reward_model_name_or_path": "other"}, {"actor": 3, "critic": 2, "reward": 0}, [OFF]),
        ("default", {"reward_model_name_or_path": "rm"}, {"actor": 3, "critic": 2}, [OFF, HEAD]),
        ("default", FUNCTION, {"actor": 3, "critic": 2}, [OFF]),
        ("openai", {}, {"actor": 3, "critic": 2, "reward": 0}, [OFF]),
        ("trl_rloo", {"critic_lora_dim": 0, "critic_zero_stage": None}, {"actor": 3, "reward": 3}, [OFF]),
    ],
)
def test_what_trains_adapters_alone_plays_what_it_was(dialect, given, engines, shared):
    args = flags(**({"actor_zero_stage": 3, "critic_zero_stage": 2, "dialect": dialect} | LORA | given))
    assert roles(args) == engines
    assert list(args.spec.shared.values()) == shared
    assert list(args.ds_configs) == list(engines)


def test_a_frozen_model_is_what_the_adapter_was_that_training_goes_on_with(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    args = flags(actor_model_name_or_path=str(tmp_path), **LORA)
    began = "the reference is the actor with the adapter that it began with"
    assert list(args.spec.shared.values()) == [began, HEAD]


def test_the_optimizer_is_the_dialects():
    for name in ("openai", "summarize", "default"):
        dialect, spec = get_dialect(name), flags(dialect=name).spec
        for optimizer in (spec.actor_optimizer, spec.critic_optimizer):
            assert optimizer.form == ("tf_adam" if name == "openai" else "adamw")
            assert optimizer.decay == ("all" if name == "summarize" else "matrices")
            assert (optimizer.betas, optimizer.eps) == (dialect.betas, dialect.eps)


@pytest.mark.parametrize(
    "name, norm",
    [("default", 1.0), ("deepspeed_chat", 1.0), ("openai", 0.0), ("summarize", 0.0), ("trlx", 0.0), ("trl_ppo", 0.0)],
)
def test_gradients_are_clipped_as_the_dialect_has_it(name, norm):
    configs = flags(dialect=name).ds_configs
    assert [configs[role]["gradient_clipping"] for role in ("actor", "critic")] == [norm, norm]


@pytest.mark.parametrize(
    "dialect, given, told",
    [
        (
            "default",
            {"offload_reference_model": True, **HYDRA},
            "--offload_reference_model with hydra_layers 2 (dialect default): the reference is a few layers within the "
            "actor's engine. Leave it out, or set hydra_layers to 0.",
        ),
        (
            "default",
            {"reference_ds_config": "ref.json", **HYDRA},
            "--reference_ds_config with hydra_layers 2 (dialect default): the reference is a few layers within the "
            "actor's engine. Leave it out, or set hydra_layers to 0.",
        ),
        (
            "default",
            {"offload_reference_model": True, **LORA},
            f"--offload_reference_model with --only_optimize_lora: {OFF}. Leave it out, or train without "
            "--only_optimize_lora.",
        ),
        (
            "default",
            {"reward_ds_config": "reward.json", **LORA},
            f"--reward_ds_config with --only_optimize_lora: {HEAD}. Leave it out, or train without "
            "--only_optimize_lora.",
        ),
        (
            "trl_rloo",
            {"critic_zero_stage": 2},
            "--critic_zero_stage 2: the dialect trl_rloo has no critic. Leave it out.",
        ),
        (
            "trl_rloo",
            {"critic_gradient_checkpointing": True},
            "--critic_gradient_checkpointing: the dialect trl_rloo has no critic. Leave it out.",
        ),
        (
            "trl_rloo",
            {"reward_model_name_or_path": "other"},
            "--critic_model_name_or_path rm: in the dialect trl_rloo the critic does not exist, and the scores come "
            "from elsewhere. Leave it out.",
        ),
        (
            "openai",
            {"reward_function": "module:function"},
            "--critic_model_name_or_path rm: in the dialect openai the critic starts with a new head on the SFT model, "
            "and the scores come from elsewhere. Leave it out, or give --reward_model_name_or_path rm "
            "to have it score, too.",
        ),
        (
            "trl_rloo",
            {"offload": True},
            "--offload with --actor_zero_stage 0: there is nothing that could be offloaded. "
            "Offload needs stage 1, 2 or 3.",
        ),
        (
            "default",
            {"offload": True, "actor_zero_stage": 2},
            "--offload with --critic_zero_stage 0: there is nothing that could be offloaded. "
            "Offload needs stage 1, 2 or 3.",
        ),
    ],
)
def test_contradictions_are_refused(dialect, given, told):
    with pytest.raises(UserError) as refusal:
        _ = flags(**given, dialect=dialect).spec
    assert str(refusal.value) == told


def test_offload_without_a_critic_asks_nothing_of_it():
    spec = flags(offload=True, actor_zero_stage=2, dialect="trl_rloo").spec
    assert [choice.offload for choice in spec.engine_configs] == [True, False, False]


TRUNK = {"actor_lora_dim": 4, "only_optimize_lora": True, "share_trunk": True}


def test_one_trunk_is_one_engine_for_all_roles():
    args = flags(**TRUNK, actor_zero_stage=2, critic_zero_stage=2)
    spec = args.spec
    assert list(args.ds_configs) == ["actor"] and spec.engine_configs == [spec.actor]
    assert spec.shared.keys() == {"critic", "reference", "reward"}
    assert (spec.actor_lora.lr, spec.critic_lora.dim, spec.critic_lora.lr) == (5e-4, 4, 5e-4)
    given = flags(**TRUNK, critic_lora_dim=8, critic_lora_learning_rate=0.1).spec
    assert (given.critic_lora.dim, given.critic_lora.lr) == (8, 0.1)
    assert flags(**TRUNK, dialect="trl_rloo").spec.shared.keys() == {"reference", "reward"}


@pytest.mark.parametrize(
    "given, message",
    [
        ({"only_optimize_lora": False}, "--share_trunk needs --only_optimize_lora and --actor_lora_dim"),
        ({"actor_zero_stage": 1, "critic_zero_stage": 2}, "--critic_zero_stage 2 with --share_trunk: .*stage, 1"),
        ({"critic_ds_config": "x.json"}, "--critic_ds_config x.json with --share_trunk: "),
        ({"actor_zero_stage": 2, "offload": True}, "--share_trunk with an offloaded optimizer: "),
        ({"offload_reward_model": True}, "--offload_reward_model with --share_trunk: the reward model is the actor's"),
        ({"set": ["hydra_layers=2"]}, "--actor_lora_dim 4 with hydra_layers 2"),
    ],
)
def test_what_a_shared_trunk_cannot_have_is_refused(given, message):
    args = flags(**TRUNK | given)
    with pytest.raises(UserError, match=message):
        args.validate()
        _ = args.ds_configs


def test_rows_keep_their_padding_where_numbers_of_it_count():
    for words, flags_class in (
        ({"dialect": "deepspeed_chat"}, None),
        ({"pairwise_loss": "from_difference"}, RewardFlags),
    ):

        def given(**values):
            if flags_class is None:
                return flags(**words, **values)
            return RewardFlags(output_dir="out", data_path=["d"], model_name_or_path="m", **words, **values)

        assert not given(attn_implementation="flash_attention_2").attention.packs
        with pytest.raises(UserError, match="^--packing packed: .* counts numbers of padding.* give padded"):
            given(packing="packed").attention  # noqa: B018
    assert flags(packing="packed").spec.attention.packs
    assert flags(attn_implementation="flash_attention_3").attention.packs and not flags().attention.packs
