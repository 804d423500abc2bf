"""The flags that the merge, comparison and audit programs share. They have finished models answer held-out prompts."""

from dataclasses import dataclass
from typing import ClassVar

from engine.algorithms import Dialect
from engine.engine_spec import EngineSpec
from engine.errors import UserError
from engine.zero.config import EngineConfig
from training.config.environment import EnvironmentFlags
from training.config.flags import DataFlags, flag
from training.config.models import FunctionFlags, ServerFlags, refuse_twice


@dataclass(kw_only=True)
class MeasuringFlags(EnvironmentFlags, DataFlags):
    """The flags that say which prompts are answered, and how responses are drawn. Each program adds
    reward_model_name_or_path."""

    phase: ClassVar[int] = 3
    program: ClassVar[str]
    """The program's name in messages."""

    num_eval_prompts: int = flag(128, "held-out prompts that each model answers", least=1, group="measuring")
    max_prompt_seq_len: int = flag(256, "longest prompt, in tokens", least=1)
    max_answer_seq_len: int = flag(256, "longest response, in tokens", least=1)
    max_reward_seq_len: int | None = flag(
        None,
        "most tokens of a prompt and its response for reward models that read texts, as in step 3",
        least=1,
        only_with="reward_model_name_or_path",
    )
    reward_step_end: str | None = flag(
        None,
        "the text that ends a step, for process reward models, as in step 3",
        only_with="reward_model_name_or_path",
    )
    cut_responses: str = flag(
        Dialect().cut_responses,
        "what reward models that read the policy's token ids get of a response without an end: the response as it is "
        "(open), or with an end (closed)",
        choices=("open", "closed"),
    )
    stop: list[str] = flag([], "strings that end a response, in addition to end tokens")
    temperature: float = flag(1.0, "sampling temperature", above=0)
    per_device_eval_batch_size: int = flag(16, "responses that each rank draws and scores at a time", least=1)
    zero_stage: int = flag(
        0, "3: each model is partitioned over the ranks. 0: each rank holds all models", choices=(0, 3)
    )

    def validate(self) -> None:
        """Raise UserError for values that cannot work, alone or together."""
        super().validate()
        if self.preflight:
            raise UserError(f"--preflight: the {self.program} program has no use for it. Leave it out.")

    def spec_of(self, path: str) -> EngineSpec:
        """The specification of the engines that measure the policy at `path`: frozen engines of the policy, the
        reference and the reward models."""
        roles = ("actor", "reference", *(["reward"] if self.reward_model_name_or_path else []))
        return EngineSpec(
            actor_path=path,
            critic_path=None,
            with_critic=False,
            reward_paths=tuple(self.reward_model_name_or_path),
            chat_template=self.chat_template,
            trust_remote_code=self.trust_remote_code,
            attention=self.attention,
            dtype=str(self.dtype),
            micro_batch_size=self.per_device_eval_batch_size,
            **{role: EngineConfig(role, self.zero_stage) for role in roles},
        )


@dataclass(kw_only=True)
class RewardsFlags(ServerFlags, FunctionFlags, MeasuringFlags):
    """The flags of rewards that stand side by side: each has scores of its own, and none are added up."""

    reward_model_name_or_path: list[str] = flag([], "reward models; each gives scores of its own", group="rewards")

    def validate(self) -> None:
        """Raise UserError for values that cannot work, alone or together."""
        super().validate()
        if not (self.reward_model_name_or_path or self.reward_function or self.reward_url or self.environment):
            raise UserError(
                "there is no reward: give --reward_model_name_or_path, --reward_function, --reward_url, or "
                "--environment."
            )
        refuse_twice(self, "reward_model_name_or_path")

    @property
    def functions(self) -> dict[str, str]:
        """{function: the flag that names it}, in the order of their scores."""
        return dict.fromkeys(self.reward_function, "--reward_function")
