"""The flags of step 3's models, rewards and engines, and the LoRA flags of all steps.

LoRA's flags have DeepSpeed-Chat's names and meanings (microsoft/DeepSpeedExamples 83757d9c,
applications/DeepSpeed-Chat/training/step*/main.py). Further LoRA flags are named as in peft. In DeepSpeed-Chat the
default of `--lora_module_name` is "decoder.layers.", which fits OPT only. Here the default adapts all linear layers but
the head; in OPT these are the same layers.
"""

import re
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import ClassVar
from urllib.parse import urlsplit

from engine.algorithms import Dialect
from engine.engine_spec import EngineSpec, OptimizerSpec, frozen_stage
from engine.errors import UserError, without_query
from engine.models.adapter_folders import read_adapter
from engine.models.checking import reads_texts
from engine.models.lora import ALL_LINEAR, LoraSpec
from engine.models.model_paths import same_model
from engine.reward.server import FORMS, OWN_FIELDS, ServerSettings
from engine.zero.config import EngineConfig, build_ds_config, chosen_stage, refuse_offload_of_roles, stage_of_file
from training.config.algorithm import MOVING, ReferenceFlags
from training.config.environment import EnvironmentFlags
from training.config.flags import REQUIRED, ProgramFlags, RunFlags, flag

LEARNING_RATE = 5e-4  # DeepSpeed-Chat's LoRA learning rate, the same for actor and critic
SCORE = "eval/score"  # the held-out number by which models are chosen unless a flag names another
RANKS = ("lora_dim", "actor_lora_dim", "critic_lora_dim")
"""The flags that turn LoRA on. Each step has one or two of them."""


@dataclass(kw_only=True)
class LoraFlags(RunFlags):
    """The flags that all adapters of a run share. Subclasses add the flags for the rank of each model's adapter.

    lora_models: for each model that can have an adapter, the prefix of its flags `lora_dim` and the like.
    """

    lora_models: ClassVar[tuple[str, ...]]

    only_optimize_lora: bool = flag(
        False,
        "train only the LoRA factors and a score head; without this flag, weights without an adapter train too, at the "
        "model's own learning rate",
        only_with=RANKS,
        group="LoRA",
    )
    lora_alpha: float | None = flag(
        None,
        "alpha of LoRA: updates are scaled by alpha / rank. By default 1, as in DeepSpeed-Chat (peft's default is 8)",
        above=0,
        only_with=RANKS,
    )
    lora_target_modules: list[str] = flag(
        [],
        "layers that get an adapter, by the last part of their names, such as q_proj v_proj. all-linear, the default: "
        "all linear layers but the output head; all-linear lm_head adds it",
        only_with=RANKS,
    )
    save_merged: str = flag(
        "auto",
        "save models with their adapters merged in, beside the adapters; auto: if the disk has room",
        choices=("auto", "true", "false"),
        only_with=RANKS,
    )

    def validate(self) -> None:
        """Raise UserError for values that cannot work, by themselves or in combination."""
        super().validate()
        for model in self.lora_models:
            if getattr(self, f"{model}lora_module_name") and self.lora_target_modules:
                raise UserError(
                    f"{self.word(f'{model}lora_module_name')} and {self.word('lora_target_modules')} say the same. "
                    "Give one of them."
                )
        if self.save_merged == "false" and not self.only_optimize_lora:
            raise UserError(
                "--save_merged false without --only_optimize_lora: an adapter has no place for the biases, norms and "
                "embeddings that train too, so that the merged model is all there is to save. Leave it out, or give "
                "--only_optimize_lora."
            )

    def lora(self, model: str = "") -> LoraSpec | None:
        """The adapter that the flags ask for; None for no adapter. model: one of `lora_models`."""
        dim, rate = getattr(self, f"{model}lora_dim"), getattr(self, f"{model}lora_learning_rate")
        if not dim:
            return None
        targets = getattr(self, f"{model}lora_module_name") or tuple(self.lora_target_modules)
        if model == "critic_" and ALL_LINEAR in self.lora_target_modules:
            targets = ()  # the only other target is the output head, which a scorer lacks
        return LoraSpec(
            dim=dim,
            alpha=1.0 if self.lora_alpha is None else self.lora_alpha,
            targets=ALL_LINEAR if targets in ((), (ALL_LINEAR,)) else targets,
            dropout=getattr(self, "lora_dropout", 0.0),  # step 3 has none
            lr=LEARNING_RATE if rate is None else rate,
            only=self.only_optimize_lora,
            seed=self.seed,
        )

    def check_rate(self, model: str, rate: float, by: str | None = None) -> None:
        """Raise UserError if LoRA factors are to be trained although the learning rate of the model's weights is 0. The
        learning rate of the factors is stored as a multiple of the weights' learning rate, so it would be 0 too.

        model: one of `lora_models`. rate: the learning rate of the model's weights. by: the flag that gives the model
        LoRA factors, if that is not the flag for their rank.
        """
        dim = getattr(self, f"{model}lora_dim")
        if (dim or by) and not rate:
            raise UserError(
                f"--{model}learning_rate 0 with {by or f'--{model}lora_dim {dim}'}: the rate of the factors is held as "
                "a multiple of it. Give one above 0; --only_optimize_lora trains the factors alone."
            )


@dataclass(kw_only=True)
class ModelLoraFlags(LoraFlags):
    """The flags of the adapter in steps 1 and 2."""

    lora_models: ClassVar[tuple[str, ...]] = ("",)

    lora_dim: int = flag(0, "rank of the LoRA factors; 0: no LoRA, all weights train", least=0)
    lora_module_name: str | None = flag(
        None,
        "adapt the linear layers whose names contain this text, in place of --lora_target_modules",
        only_with="lora_dim",
    )
    lora_learning_rate: float | None = flag(
        None, f"peak learning rate of the LoRA factors; by default {LEARNING_RATE}", least=0, only_with="lora_dim"
    )
    lora_dropout: float = flag(
        0.0, "dropout of the input of the LoRA factors, in training", least=0, below=1, only_with="lora_dim"
    )


@dataclass(kw_only=True)
class RoleLoraFlags(LoraFlags):
    """The flags of the adapters in step 3."""

    lora_models: ClassVar[tuple[str, ...]] = ("actor_", "critic_")

    actor_lora_dim: int = flag(0, "rank of the actor's LoRA factors; 0: no LoRA, all its weights train", least=0)
    critic_lora_dim: int = flag(0, "rank of the critic's LoRA factors; 0: no LoRA, all its weights train", least=0)
    actor_lora_module_name: str | None = flag(
        None,
        "adapt the actor's linear layers whose names contain this text, in place of --lora_target_modules",
        only_with="actor_lora_dim",
    )
    critic_lora_module_name: str | None = flag(
        None,
        "adapt the critic's linear layers whose names contain this text, in place of --lora_target_modules",
        only_with="critic_lora_dim",
    )
    actor_lora_learning_rate: float | None = flag(
        None,
        f"peak learning rate of the actor's LoRA factors; by default {LEARNING_RATE}",
        least=0,
        only_with="actor_lora_dim",
    )
    critic_lora_learning_rate: float | None = flag(
        None,
        f"peak learning rate of the critic's LoRA factors; by default {LEARNING_RATE}",
        least=0,
        only_with="critic_lora_dim",
    )
    share_trunk: bool = flag(
        False,
        "one language model in one engine serves as actor, critic, reference and reward model, which differ in "
        "their adapters and heads; needs --only_optimize_lora, --actor_lora_dim, and a reward model that is an adapter "
        "on the actor's base",
    )

    def validate(self) -> None:
        """Raise UserError for values that cannot work, by themselves or in combination."""
        super().validate()
        if self.share_trunk and not (self.only_optimize_lora and self.actor_lora_dim):
            raise UserError(
                "--share_trunk needs --only_optimize_lora and --actor_lora_dim: what all four models share must not "
                "train."
            )


@dataclass(kw_only=True)
class FunctionFlags(RunFlags):
    """The flags of reward functions. Step 3 and measuring programs share them."""

    reward_function: list[str] = flag(
        [],
        "functions that score responses: module:function, file.py:function, a RewardSource class (docs/extending.md), "
        "or the built-in math_verify and format (docs/verifiable.md). A function gets the texts of some prompts and "
        "responses at a time, and columns of the data; it returns a number for each response, or numbers for its steps "
        "(docs/step_rewards.md)",
        group="rewards",
    )
    answer_column: str | None = flag(
        None,
        "column with the right answers, for math_verify (pip install .[math]); by default answer",
        only_with="reward_function=math_verify",
    )
    response_format: str | None = flag(
        None,
        "regular expression that a whole response has to match, for format; by default reasoning in <think> tags and "
        "an answer in <answer> tags",
        only_with="reward_function=format",
    )

    def validate(self) -> None:
        """Raise UserError if a function is given twice, or if --response_format is not a valid regular expression."""
        super().validate()
        refuse_twice(self, "reward_function")
        try:
            re.compile(self.response_format or "")
        except re.error as error:
            raise UserError(
                f"--response_format {self.response_format}: is not a regular expression ({error}). Correct the pattern."
            ) from None


def refuse_twice(args: ProgramFlags, name: str) -> None:
    """Raise UserError if the list of the flag `name` has the same item twice, a folder by whatever path."""
    twice = next((pair for pair in combinations(getattr(args, name), 2) if same_model(*pair)), None)
    if twice is not None:
        raise UserError(f"{args.word(name)}: {without_query(twice[1])} is given twice. Give it once.")


@dataclass(kw_only=True)
class ServerFlags(RunFlags):
    """The flags of reward servers. Step 3 and measuring programs share them."""

    reward_url: list[str] = flag(
        [],
        "URL of a server that scores responses, http://HOST:PORT/PATH (docs/reward_server.md). Several servers with "
        "the same scores share the requests; while one fails, the others answer",
        group="reward server",
    )
    reward_url_form: str = flag(
        "items",
        "form of requests and answers. items: ours, which matches scores to responses by ids. openrlhf: that of "
        "OpenRLHF's trainer",
        choices=FORMS,
        only_with="reward_url",
    )
    reward_url_columns: list[str] = flag(
        [],
        "columns of the data that are sent with each response; openrlhf takes one, as labels",
        only_with="reward_url",
    )
    reward_url_batch_size: int = flag(64, "most responses in one request", least=1, only_with="reward_url")
    reward_url_timeout: float = flag(
        180.0,
        "seconds in which a server has to begin its answer, and again to complete it",
        above=0,
        only_with="reward_url",
    )
    reward_url_patience: float = flag(
        600.0,
        "seconds for which a request without an answer, or with status 429 or 5xx, is repeated before the run stops "
        "with a checkpoint",
        least=0,
        only_with="reward_url",
    )

    def validate(self) -> None:
        """Raise UserError for invalid URLs, and for columns that cannot be sent in a request."""
        super().validate()
        for url in self.reward_url:
            check_reward_url(url)
        columns, most = self.reward_url_columns, FORMS[self.reward_url_form].most_columns
        said = self.word("reward_url_columns")
        if taken := [name for name in columns if name in OWN_FIELDS and self.reward_url_form == "items"]:
            raise UserError(f"{said}: {taken[0]} is what something else in a request is called. Leave it out.")
        if most is not None and len(columns) > most:
            raise UserError(
                f"{said}: {len(columns)} columns, and the form {self.reward_url_form} has room for {most}. Name {most}."
            )

    def reward_server(self) -> ServerSettings | None:
        """The settings of the reward servers; None if the run has no reward server."""
        if not self.reward_url:
            return None
        return ServerSettings(
            urls=self.reward_url,
            form=self.reward_url_form,
            columns=self.reward_url_columns,
            batch_size=self.reward_url_batch_size,
            timeout=self.reward_url_timeout,
            patience=self.reward_url_patience,
        )


@dataclass(kw_only=True)
class ScoreFlags(ServerFlags, EnvironmentFlags, FunctionFlags):
    """The flags of the parts of step 3's and merging's score besides reward models, and of all parts' weights."""

    reward_weights: list[float] = flag(
        [],
        "weights in the score, by default 1: one for each --reward_function, then one for the reward server, then one "
        "for the environment. A function of weight 0 is only measured. Reward models have --reward_model_weight",
        only_with=("reward_function", "reward_url", "environment"),
        group="rewards",
    )
    overlap_rewards: bool = flag(
        False,
        "score finished responses, in threads, while others are still drawn; a score must not depend on other "
        "responses",
        only_with=("reward_function", "reward_url"),
    )
    reward_model_weight: list[float] = flag(
        [],
        "weights of the reward models in the score, one for each; by default 1. A model of weight 0 is only measured",
    )
    raw_reward_scores: bool = flag(
        False,
        "take the scores of several reward models as they are. By default each model's become (score - mean) / "
        "standard deviation, by the first scored responses, unless step 2 normalised them",
    )
    length_penalty: float = flag(0.0, "number subtracted from the score for each token of the response")

    def validate(self) -> None:
        """Raise UserError for a reward model that is given twice, for weights that do not fit the rewards, and for
        early scores of conversations."""
        super().validate()
        if self.overlap_rewards and self.environment is not None:
            raise UserError(
                "--overlap_rewards with --environment: conversations are scored when all of them have ended. Leave it "
                "out."
            )
        refuse_twice(self, "reward_model_name_or_path")
        models = self.reward_paths
        count = len(self.reward_model_weight)
        if models and count not in (0, len(models)):
            raise UserError(
                f"{self.word('reward_model_weight')}: {count} weight{'s' * (count > 1)} for "
                f"{len(models)} reward model{'s' * (len(models) > 1)}, {', '.join(models)}. Give one for each, in this "
                "order, or none."
            )
        weights, others = self.reward_weights, self.other_rewards
        if weights and len(weights) != len(others):
            parts = [*self.reward_function, *["the reward server"] * bool(self.reward_url)]
            parts += ["the environment"] * bool(self.environment)
            raise UserError(
                f"{self.word('reward_weights')}: {len(weights)} weights. They belong to {', '.join(parts)}, in this "
                f"order: give {len(others)} or none. The reward models' weights are --reward_model_weight. To mix the "
                f"reward model in by half, give {self.half_by_model}."
            )
        by_models = self.reward_model_weight or [1.0]
        given = [self.word(name) for name in ("reward_model_weight", "reward_weights") if getattr(self, name)]
        if given and not any([*by_models * bool(models), *(weights or [1.0] * len(others)), self.length_penalty]):
            raise UserError(f"{' and '.join(given)}: every score would be 0. Give one that is not.")

    @property
    def half_by_model(self) -> str:
        """The flags that give the reward model half of the score's weight, and the other rewards together the other
        half."""
        models = self.reward_paths or [getattr(self, "critic_model_name_or_path", None) or "REWARD_MODEL"]
        counts = len(models), len(self.other_rewards)
        by_models, by_others = (" ".join([f"{0.5 / count:g}"] * count) for count in counts)
        return (
            f"--reward_model_name_or_path {' '.join(models)} --reward_model_weight {by_models} "
            f"--reward_weights {by_others}"
        )

    @property
    def reward_paths(self) -> list[str]:
        """The reward models' paths; empty if the scores come from elsewhere alone."""
        return self.reward_model_name_or_path

    @property
    def other_rewards(self) -> list[str]:
        """The values of --reward_function, then the first URL of --reward_url, then the environment: one item for each
        part of the score besides the reward model. All servers together are one part."""
        return [*self.reward_function, *self.reward_url[:1], *filter(None, [self.environment])]

    @property
    def scores_elsewhere(self) -> bool:
        """Whether a part of the score comes from elsewhere than reward models; a part of weight 0 is only measured."""
        return any(self.reward_weights or [1.0] * len(self.other_rewards))


def check_reward_url(url: str) -> None:
    """Raise UserError if the URL is invalid or contains a user's name. The message shows no password or key of the
    URL."""
    shown = re.sub("//.*@[^/]*", "//...", url).partition("?")[0]
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        parts, whole = urlsplit(""), False
    if not whole or parts.fragment or not url.isascii() or not url.isprintable() or " " in url:
        raise UserError(f"--reward_url {shown}: is not a URL of a server. Give http://HOST:PORT/PATH.")
    if parts.username is not None or parts.password is not None:
        raise UserError(
            f"--reward_url {shown}: holds a user's name, which messages and files would show. Leave it out."
        )


@dataclass(kw_only=True)
class ModelFlags(ScoreFlags, RoleLoraFlags, ReferenceFlags):
    """The flags of step 3's models, of their adapters and of their engines."""

    actor_model_name_or_path: str = flag(
        REQUIRED, "SFT model that the actor and the reference start from", group="models"
    )
    critic_model_name_or_path: str | None = flag(
        None,
        "reward model that the critic starts from; by default the first one that reads the actor's token ids. Without "
        "such a model, and beside a function, server or environment whose weight is not 0, the critic is the SFT model "
        "with a new head. In dialects whose critic starts otherwise, or without a critic, it names the reward model "
        "only",
    )
    reward_model_name_or_path: list[str] = flag(
        [],
        "reward models; by default the path of the critic, or none beside a function, server or environment whose "
        "weight is not 0. The score is their sum, weighted by --reward_model_weight",
    )
    max_reward_seq_len: int | None = flag(
        None,
        "most tokens of a prompt and its response for reward models that read texts, in their own tokens; by default 2 "
        "x (--max_prompt_seq_len + --max_answer_seq_len) + 64, but never more than they have positions for",
        least=1,
        only_with=("reward_model_name_or_path", "critic_model_name_or_path"),
    )
    reward_step_end: str | None = flag(
        None,
        "text that ends a step, for process reward models (\\n is a new line); by default what their folder says, else "
        "a new line",
        only_with=("reward_model_name_or_path", "critic_model_name_or_path"),
    )
    actor_zero_stage: int | None = flag(
        None,
        "ZeRO stage of the actor (default 0; on a single GPU in 16 bits 1); the reference, and without a critic the "
        "reward models, have stage 3 if the actor has, else 0",
        least=0,
        most=3,
        group="engines",
    )
    critic_zero_stage: int | None = flag(
        None,
        "ZeRO stage of the critic (default 0; on a single GPU in 16 bits 1); the reward model has stage 3 if the "
        "critic has, else 0",
        least=0,
        most=3,
    )
    offload: bool = flag(
        False, "keep optimizer states (at stage 3 also parameters) of models that train in host memory"
    )
    offload_reference_model: bool = flag(False, "keep the reference in host memory while it is not used")
    offload_reward_model: bool = flag(False, "keep the reward models in host memory while they are not used")
    actor_ds_config: str | None = flag(None, "DeepSpeed JSON file of the actor, in place of one of configs/ds")
    critic_ds_config: str | None = flag(None, "DeepSpeed JSON file of the critic")
    reference_ds_config: str | None = flag(None, "DeepSpeed JSON file of the reference")
    reward_ds_config: str | None = flag(None, "DeepSpeed JSON file of the reward models")
    actor_gradient_checkpointing: bool = flag(
        False, "recompute the actor's activations in backward passes, to save memory"
    )
    critic_gradient_checkpointing: bool = flag(
        False, "recompute the critic's activations in backward passes, to save memory"
    )

    def validate(self) -> None:
        """Raise UserError for values that cannot work, by themselves or in combination."""
        super().validate()
        self._check_rewards()
        for role in ("reference", "reward"):
            offload, path = f"offload_{role}_model", getattr(self, f"{role}_ds_config")
            EngineConfig(role, 0, getattr(self, offload), path).check_offload(f"--{offload}", trained=False)

    def _check_rewards(self) -> None:
        if not self.other_rewards and not self.reward_paths:
            role = "critic" if self.resolved.dialect.critic_start == "reward_model" else "reward"
            raise UserError(
                f"--{role}_model_name_or_path is missing: give the reward model's folder, or a function of "
                "your own with --reward_function, a server with --reward_url, or an --environment."
            )
        if self.reward_paths:
            return
        idle = [name for name in ("reward_ds_config", "offload_reward_model") if getattr(self, name)]
        idle += ["reward_model_weight"] * bool(self.reward_model_weight)
        if idle:
            others = ("--reward_function", "--reward_url", "--environment")
            beside = next(name for name in others if getattr(self, name[2:]))
            raise UserError(
                f"{self.word(idle[0])}: there is no reward model beside {beside}. Name one with "
                "--reward_model_name_or_path."
            )

    @property
    def reward_paths(self) -> list[str]:
        """The reward models' paths; empty if the scores come from functions or a server alone."""
        if self.reward_model_name_or_path or self.scores_elsewhere or self.critic_model_name_or_path is None:
            return self.reward_model_name_or_path
        return [self.critic_model_name_or_path]

    @cached_property
    def text_reward_paths(self) -> list[str]:
        """Those of the reward models that read texts (`reads_texts`). Models that are not on this machine, or cannot be
        read, count as reading the actor's token ids."""
        actor, flag = self.actor_model_name_or_path, "--reward_model_name_or_path"
        here = [path for path in self.reward_paths if self.looks_at(path) and self.looks_at(actor)]
        if not here:
            return []
        try:
            tokenizer = self.read_tokenizer(actor, "--actor_model_name_or_path", self.resolved.dialect.pad_token)
            return [path for path in here if reads_texts(tokenizer, path, flag, self.trust_remote_code)]
        except UserError:  # `check_models` says what is wrong with the models
            return []

    @property
    def critic_path(self) -> str | None:
        """The folder that the critic starts from; None if it starts with a new head on the SFT model, or if there is
        no critic."""
        if self.resolved.dialect.critic_start != "reward_model":
            return None
        if self.critic_model_name_or_path is not None or self.scores_elsewhere:
            return self.critic_model_name_or_path
        return next((path for path in self.reward_paths if path not in self.text_reward_paths), None)

    @property
    def models(self) -> list[tuple[str, str]]:
        """(flag, path) of each model that the flags name."""
        given = [("actor_model_name_or_path", self.actor_model_name_or_path)]
        if self.critic_model_name_or_path is not None:
            given.append(("critic_model_name_or_path", self.critic_model_name_or_path))
        return given + [("reward_model_name_or_path", path) for path in self.reward_model_name_or_path]

    def stage(self, role: str) -> int:
        """The ZeRO stage of the actor or the critic."""
        given, path = getattr(self, f"{role}_zero_stage"), getattr(self, f"{role}_ds_config")
        return chosen_stage(given, path, role, self.dtype, self.gpus)

    def _trained(self, role: str) -> EngineConfig:
        return EngineConfig(role, self.stage(role), self.offload, getattr(self, f"{role}_ds_config"))

    @cached_property
    def spec(self) -> EngineSpec:
        """The engines to build. It is computed once, after --dtype has its final value. Raises UserError if flags
        contradict the dialect or a DeepSpeed file."""
        dialect = self.resolved.dialect
        self._check_engines(dialect)

        def optimizer(lr: float, weight_decay: float) -> OptimizerSpec:
            return OptimizerSpec(
                lr=lr,
                betas=dialect.betas,
                eps=dialect.eps,
                weight_decay=weight_decay,
                max_grad_norm=dialect.max_grad_norm,
                form=dialect.optimizer,
                decay=dialect.decay,
            )

        def frozen(role: str, partner: EngineConfig, offload: bool) -> EngineConfig:
            path = getattr(self, f"{role}_ds_config")
            stage = stage_of_file(path, role) if path else None
            return EngineConfig(role, frozen_stage(partner) if stage is None else stage, offload, path)

        actor, critic = self._trained("actor"), self._trained("critic")
        spec = EngineSpec(
            actor_path=self.actor_model_name_or_path,
            with_critic=dialect.has_critic,
            critic_path=self.critic_path,
            reward_paths=tuple(self.reward_paths),
            text_reward_paths=tuple(self.text_reward_paths),
            hydra_layers=dialect.hydra_layers,
            actor_lora=self.lora("actor_"),
            critic_lora=self._critic_lora(dialect),
            share_trunk=self.share_trunk,
            pad_token=dialect.pad_token,
            chat_template=self.chat_template,
            trust_remote_code=self.trust_remote_code,
            attention=self.attention,
            dtype=self.dtype,
            actor=actor,
            critic=critic,
            actor_optimizer=optimizer(dialect.actor_lr, dialect.actor_weight_decay),
            critic_optimizer=optimizer(dialect.critic_lr, dialect.critic_weight_decay),
            micro_batch_size=self.per_device_training_batch_size,
            actor_gradient_checkpointing=self.actor_gradient_checkpointing,
            critic_gradient_checkpointing=self.critic_gradient_checkpointing,
            ema_decay=dialect.ema_decay if self.keeps_average else None,
            ema_device=self.ema_device,
            reference_is_ema=self.reference == MOVING,
            reference_refresh_steps=self.reference_refresh_steps,
            reference_mixup_alpha=self.reference_mixup_alpha,
        )
        self._check_shared(spec)
        engines = {}
        if spec.has_engine("reference"):
            engines["reference"] = frozen("reference", actor, self.offload_reference_model)
        if spec.has_engine("reward"):
            partner = critic if dialect.has_critic else actor
            engines["reward"] = frozen("reward", partner, self.offload_reward_model)
        return replace(spec, **engines)

    @cached_property
    def ds_configs(self) -> dict[str, dict]:
        """{engine: its whole DeepSpeed configuration}. Raises UserError if flags and DeepSpeed files contradict each
        other."""
        configs, clipping = {}, self.resolved.dialect.max_grad_norm
        for config in self.spec.engine_configs:
            trained = config.role in ("actor", "critic")
            configs[config.role] = build_ds_config(
                config,
                dtype=self.dtype,
                micro_batch_size=self.per_device_training_batch_size,
                trained=trained,
                gradient_clipping=clipping if trained and not self.share_trunk else 0.0,  # clipped per role
            )
        if self.share_trunk:
            refuse_offload_of_roles(configs["actor"])
        return configs

    def _check_engines(self, dialect: Dialect) -> None:
        """Raise UserError for flags of models that this dialect does not have, and for offload flags without effect."""
        for name in (
            "critic_zero_stage",
            "critic_ds_config",
            "critic_gradient_checkpointing",
            "critic_pretrain_steps",
            "critic_warmup_steps",
            "critic_lora_dim",
        ):
            if not dialect.has_critic and getattr(self, name):
                raise UserError(f"{self.word(name)}: the dialect {dialect.name} has no critic. Leave it out.")
        path = self.critic_model_name_or_path
        if dialect.critic_start != "reward_model" and path is not None and path not in self.reward_paths:
            start = "starts with a new head on the SFT model" if dialect.has_critic else "does not exist"
            add = f", or give --reward_model_name_or_path {path} to have it score, too" * (not self.reward_paths)
            raise UserError(
                f"--critic_model_name_or_path {path}: in the dialect {dialect.name} the critic {start}, and "
                f"the scores come from elsewhere. Leave it out{add}."
            )
        for role in ("actor", "critic") if dialect.has_critic else ("actor",):
            if role == "actor" or not self.share_trunk:
                self._trained(role).check_offload()
        if self.share_trunk and self.critic_zero_stage not in (None, self.stage("actor")):
            raise UserError(
                f"{self.word('critic_zero_stage')} with --share_trunk: actor and critic are one engine, at "
                f"the actor's stage, {self.stage('actor')}. Leave it out."
            )
        self.check_rate("actor_", dialect.actor_lr)
        if dialect.has_critic:
            self.check_rate("critic_", dialect.critic_lr, "--share_trunk" if self.share_trunk else None)
        if dialect.hydra_layers and self.actor_lora_dim:
            raise UserError(
                f"{self.word('actor_lora_dim')} with hydra_layers {dialect.hydra_layers} (dialect "
                f"{dialect.name}): a hydra's last layers train whole. Leave it out, or set hydra_layers to 0."
            )

    def _critic_lora(self, dialect: Dialect) -> LoraSpec | None:
        """The critic's adapter. If actor and critic share one set of weights (a shared trunk), the critic always has an
        adapter. Its rank is that of the adapter from which the critic starts, or the rank of the actor's adapter."""
        given = self.lora("critic_")
        if given is not None or not self.share_trunk or not dialect.has_critic:
            return given
        actor, path = self.lora("actor_"), self.critic_path
        start = read_adapter(path, "the critic") if path is not None else None
        assert actor is not None, "--share_trunk needs --actor_lora_dim"
        return replace(actor, lr=LEARNING_RATE, dim=start.config.r if start is not None else actor.dim)

    def _check_shared(self, spec: EngineSpec) -> None:
        """Raise UserError for flags of an engine that the run does not have, because another engine computes the
        model."""
        for role, what in spec.shared.items():
            if role in spec.rewards and spec.has_engine("reward"):
                continue  # another reward model has an engine of its own, which the flags are for
            for name in (f"{role}_ds_config", f"offload_{role}_model"):
                if getattr(self, name, None):
                    raise UserError(f"{self.word(name)}: {what}. Leave it out.")
