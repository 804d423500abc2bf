"""What flags and dialect make of the engines: stages, adapters, a reference that moves, rollouts; and what does not go
together.
"""

import pytest

from engine.algorithms import DIALECTS, get_dialect
from engine.errors import UserError
from engine.models.lora import LoraSpec
from tests.training.config.command_lines import parse, refusal, step3
from training.config.step3 import RLHFFlags
from training.config.supervised import RewardFlags, SFTFlags

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
        assert (spec.critic_path, spec.reward_paths) == (critic, ("rm",))
        assert spec.with_critic == (name != "trl_rloo")
    assert flags(reward_model_name_or_path=["other"]).spec.critic_path == "rm"
    spec = flags(**FUNCTION).spec
    assert spec.critic_path is None and spec.with_critic and not spec.reward_paths
    spec = flags(reward_function="module:function", reward_weights=[0.0]).spec  # only measured
    assert (spec.critic_path, spec.reward_paths) == ("rm", ("rm",))


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


@pytest.mark.parametrize(
    "machine, given, stages",
    [
        ((True, 1), {"dtype": "bf16"}, (1, 1)),
        ((True, 1), {"dtype": "fp16", "offload": True}, (1, 1)),
        ((True, 1), {"dtype": "bf16", "actor_zero_stage": 0}, (0, 1)),
        ((True, 1), {"dtype": "bf16", "critic_ds_config": "no_stage.json"}, (1, 0)),
        ((True, 1), {"dtype": "fp32"}, (0, 0)),
        ((True, 2), {"dtype": "bf16"}, (0, 0)),
        ((False, 1), {"dtype": "bf16"}, (0, 0)),
    ],
)
def test_one_gpu_in_16_bits_has_another_usual_stage(machine, given, stages, tmp_path, monkeypatch):
    """Of what trains; a flag or a file wins."""
    (tmp_path / "no_stage.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("training.config.flags.on_gpu", lambda: machine[0])
    monkeypatch.setattr("engine.distributed.world_size", lambda: machine[1])
    args = flags(**given)
    assert roles(args) == dict(zip(("actor", "critic"), stages)) | {"reference": 0, "reward": 0}
    assert args.ds_configs["actor"]["zero_optimization"]["stage"] == stages[0]
    step2 = parse("--dtype", given["dtype"], flags_class=RewardFlags)
    assert step2.ds_settings()["zero_optimization"]["stage"] == stages[1 if "actor_zero_stage" in given else 0]


@pytest.mark.parametrize(
    "given, critic",
    [
        ({}, "own"),  # the first that reads the actor's ids
        ({"critic_model_name_or_path": "other"}, "other"),
        ({"reward_model_name_or_path": ["foreign"]}, None),
        ({"reward_function": ["m:f"]}, None),
        ({"reward_function": ["m:f"], "reward_weights": [0.0]}, "own"),  # what is only measured changes nothing
        ({"dialect": "openai"}, None),  # whose critic starts with a new head
    ],
)
def test_the_critic_starts_from_a_reward_model_that_reads_the_actors_ids(monkeypatch, given, critic):
    monkeypatch.setattr(RLHFFlags, "read_tokenizer", lambda *args: None)
    monkeypatch.setattr("training.config.models.reads_texts", lambda tokenizer, path, *more: path == "foreign")
    models = {"critic_model_name_or_path": None, "reward_model_name_or_path": ["foreign", "own", "third"]}
    args = flags(**(models | given))
    assert args.spec.critic_path == critic and args.spec.text_reward_paths == ("foreign",)
    expected = ["actor", "critic", "reference", "reward", "reward_2", "reward_3"]
    assert [choice.role for choice in args.spec.engine_configs] == expected[: 3 + len(args.reward_paths)]


def test_all_reward_models_have_the_same_engine_and_one_may_be_the_critics():
    three = {"reward_model_name_or_path": ["a", "b", "c"], "critic_model_name_or_path": "b", "critic_zero_stage": 3}
    spec = flags(**three, offload_reward_model=True).spec
    assert [(one.role, one.stage, one.offload) for one in spec.engine_configs[3:]] == [
        (role, 3, True) for role in ("reward", "reward_2", "reward_3")
    ]
    spec = flags(**three, **LORA, offload_reward_model=True).spec
    assert [one.role for one in spec.engine_configs] == ["actor", "critic", "reward", "reward_3"]
    assert spec.shared["reward_2"] == "the reward model b is the critic with its adapters off and its first head"


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
        ("default", {"reward_model_name_or_path": ["other"]}, {"actor": 3, "critic": 2, "reward": 0}, [OFF]),
        ("default", {"reward_model_name_or_path": ["rm"]}, {"actor": 3, "critic": 2}, [OFF, HEAD]),
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
            "--offload_reference_model: the reference is a few layers within the actor's engine. Leave it out.",
        ),
        (
            "default",
            {"reward_ds_config": "reward.json", **LORA},
            f"--reward_ds_config reward.json: {HEAD}. Leave it out.",
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
            {"reward_model_name_or_path": ["other"]},
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
        ({"critic_ds_config": "x.json"}, "--critic_ds_config x.json: the critic is the actor's trunk"),
        ({"actor_zero_stage": 2, "offload": True}, "--share_trunk with an offloaded optimizer: "),
        ({"offload_reward_model": True}, "--offload_reward_model: the reward model is the actor's"),
        ({"set": ["hydra_layers=2"]}, "--actor_lora_dim 4 with hydra_layers 2"),
    ],
)
def test_what_a_shared_trunk_cannot_have_is_refused(given, message):
    args = flags(**TRUNK | given)
    with pytest.raises(UserError, match=message):
        args.validate()
        _ = args.ds_configs


@pytest.mark.parametrize(
    "others, message",
    [
        ({"packing": "padded"}, "--packing padded with --sequence_parallel_size 2: .* Leave one of them out"),
        ({"set": ["loss_scope=micro_batch"]}, "the dialect .* averages within micro-batches, .* loss_scope=optimizer_"),
    ],
)
def test_what_ranks_cannot_compute_together_is_refused(others, message):
    with pytest.raises(UserError, match=message):
        flags(sequence_parallel_size=2, **others).validate()


def test_rows_keep_their_padding_where_numbers_of_it_count():
    for words, flags_class in (
        ({"dialect": "deepspeed_chat"}, None),
        ({"pairwise_loss": "from_difference"}, RewardFlags),
    ):

        def given(**values):
            if flags_class is None:
                return flags(**words, **values)
            return RewardFlags(output_dir="out", data_path=["d"], model_name_or_path="m", **words, **values)

        assert given(attn_implementation="flash_attention_2").attention.packing == "padded"
        with pytest.raises(UserError, match="^--packing packed: .* counts numbers of padding.* give padded"):
            given(packing="packed").attention  # noqa: B018
        with pytest.raises(UserError, match="^--sequence_parallel_size 2: .* counts numbers of padding"):
            given(sequence_parallel_size=2).attention  # noqa: B018
    assert flags(packing="packed").spec.attention.packing == "packed"
    assert flags(attn_implementation="flash_attention_3").attention.packing == flags().attention.packing == "auto"


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
    "--actor_lora_dim 4 --lora_target_modules x --actor_lora_module_name y": "--actor_lora_module_name y and "
    "--lora_target_modules x say the same.",
    "--actor_lora_dim 4 --actor_learning_rate 0": "--actor_learning_rate 0 with --actor_lora_dim 4: the rate of the",
    "--critic_lora_dim 4 --set critic_lr=0": "--critic_learning_rate 0 with --critic_lora_dim 4: the rate of the",
    "--actor_lora_dim 4 --set hydra_layers=1": "--actor_lora_dim 4 with hydra_layers 1 (dialect default): a hydra's",
    "--critic_lora_dim 4 --dialect trl_rloo": "--critic_lora_dim 4: the dialect trl_rloo has no critic.",
    "--share_trunk": "--share_trunk needs --only_optimize_lora and --actor_lora_dim",
    "--actor_lora_dim 4 --only_optimize_lora --share_trunk --set critic_lr=0": "--critic_learning_rate 0 with "
    "--share_trunk: the rate of the factors",
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


def spec_of(**values):
    """What engines these flags ask for."""
    args = step3(dtype="fp32", **values)
    return args.spec


def test_the_average_is_kept_and_is_the_reference():
    spec = spec_of(reference="ema", ema_decay=0.9)
    assert (spec.ema_decay, spec.reference_is_ema, spec.reference_moves) == (0.9, True, True)
    assert "reference" not in [config.role for config in spec.engine_configs]
    assert "moving average" in spec.shared["reference"]
    assert step3(reference="ema").keeps_average and not step3().keeps_average
    assert step3(reference="ema").spec.ema_decay == 0.992  # the dialect's


def test_a_refresh_has_its_steps_and_share():
    spec = spec_of(reference_refresh_steps=20, reference_mixup_alpha=0.6, ema_device="cpu")
    assert (spec.reference_refresh_steps, spec.reference_mixup_alpha, spec.ema_decay) == (20, 0.6, None)
    assert spec.engine_of == {"reference": "actor"} and spec.also_computes == {}


@pytest.mark.parametrize(
    "words, message",
    [
        (("--reference", "ema", "--reference_refresh_steps", "5"), "moves after every optimizer step by itself"),
        (("--reference", "ema", "--likelihood_coef", "0.5"), "--reference ema with likelihood_coef: the likelihood is"),
        (("--reference_refresh_steps", "5", "--set", "likelihood_coef=1"), "--reference_refresh_steps 5 with likel"),
        (("--reference_mixup_alpha", "0.5"), "--reference_mixup_alpha 0.5 needs --reference_refresh_steps"),
        (("--reference_refresh_steps", "0"), "--reference_refresh_steps 0: must be at least 1."),
        (("--reference_refresh_steps", "5", "--reference_mixup_alpha", "0"), "must be greater than 0"),
        (("--reference_refresh_steps", "5", "--reference_mixup_alpha", "1.5"), "must be at most 1"),
        (
            ("--ema_device", "cpu"),
            "--ema_device cpu needs --enable_ema or --reference ema or --reference_refresh_steps.",
        ),
    ],
)
def test_mistakes(words, message):
    assert message in refusal(*words, flags_class=RLHFFlags)


@pytest.mark.parametrize("engine", [{"offload_reference_model": True}, {"reference_ds_config": "own.json"}])
def test_flags_of_an_engine_that_does_not_exist(engine):
    with pytest.raises(UserError, match=r"the reference is the weights that the actor had at the latest refresh"):
        spec_of(reference_refresh_steps=5, **engine)


def asked(*words: str) -> RLHFFlags:
    return parse(*words, flags_class=RLHFFlags)


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["--vllm_tensor_parallel_size", "2"],
            "--vllm_tensor_parallel_size 2 needs --rollout_backend vllm. Give that",
        ),
        (
            ["--rollout_backend", "replica", "--vllm_sampler", "own"],
            "--vllm_sampler own needs --rollout_backend vllm.",
        ),
        (
            ["--rollout_backend", "vllm", "--decoding", "plain"],
            r"--decoding plain needs --rollout_backend auto\|replica\|zero3\. Give that",
        ),
        (
            ["--rollout_backend", "vllm", "--replicas_between_steps", "free"],
            "--replicas_between_steps free needs --rollout_backend auto",
        ),
        (["--rollout_backend", "vllm", "--vllm_tensor_parallel_size", "0"], "--vllm_tensor_parallel_size 0"),
    ],
)
def test_flags_of_other_backends_are_refused(words, message):
    with pytest.raises(UserError, match=message):
        asked(*words)


@pytest.mark.parametrize(
    "backend, name",
    [("vllm", "vllm_tensor_parallel_size"), ("replica", "inference_tp_size"), ("auto", "sequence_parallel_size")],
)
def test_groups_of_ranks_divide_those_of_a_node(monkeypatch, backend, name):
    words = ["--rollout_backend", backend, "--actor_zero_stage", "3", f"--{name}", "4"]
    assert getattr(asked(*words), name) == 4
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_SIZE", "8")
    assert getattr(asked(*words), name) == 4
    for variables in ({"RANK": "0", "LOCAL_SIZE": "6"}, {"LOCAL_SIZE": "6"}, {"RANK": "0", "LOCAL_WORLD_SIZE": "6"}):
        for variable in ("RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(variable, raising=False)
        for variable, value in variables.items():  # of deepspeed, a dry run, torchrun
            monkeypatch.setenv(variable, value)
        with pytest.raises(UserError, match=f"--{name} 4: a node has 6 ranks, .* divides 6"):
            asked(*words)
