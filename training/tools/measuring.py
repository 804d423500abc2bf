"""Measures finished models: they answer held-out prompts, and the responses are scored. The merge, comparison and audit
programs use this file.

measuring = Measuring(args, args.spec_of("out/sft"), read_held_out(args, tokenizer))
policy = measuring.loaded("out/actor", "actor")
evaluator = measuring.evaluator_of(policy, "out/actor", reward, measuring.rollouts_of(policy))
metrics, rows = evaluator.run(1)
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from engine import distributed
from engine.algorithms import Algorithm, Dialect, end_token_id
from engine.distributed import RankGroup
from engine.engine_spec import EngineSpec
from engine.errors import UserError
from engine.experience_maker import ExperienceMaker
from engine.models.checking import check_decoding, check_policy, check_scorer, reads_texts
from engine.models.checking import check_rows as check_embedding
from engine.models.config_and_tokenizer import CLASSIFIER, LANGUAGE_MODEL, read_tokenizer, vocabulary_size
from engine.models.loading import load_policy, load_scorer
from engine.models.weight_files import listed
from engine.reference import Reference
from engine.reward.base import CombinedReward, EnvironmentReward, RewardModel, RewardSource
from engine.reward.server import ServerReward
from engine.rlhf_engine import frozen_model
from engine.rollout import Environments, RolloutBackend, SamplingConfig, build_rollouts
from engine.zero.communication import init
from engine.zero.engines import FrozenModel
from training.config.models import ServerFlags
from training.config.reward import ENVIRONMENT, SERVER, check_columns, function_source, load_given
from training.data.examples import Prompts
from training.environments import conversations, environments_of, load_environment
from training.reporting.evaluation import Evaluator
from training.reward_texts import Texts, reward_source
from training.runtime.models import check_positions, generation_stops, prompt_and_answer
from training.runtime.plan import by_part, check_reward_texts, check_server, read_prompts
from training.tools.flags import MeasuringFlags, RewardsFlags

DIALECT = Dialect(name="measured", critic_start="none", critic_lr=0.0, advantage_estimator="rloo", samples_per_prompt=2)
"""With this dialect, responses end with EOS, and log-probs are computed at the sampling temperature. Nothing is
learned, so the advantage estimator is not used."""
REWARD_MODEL = "--reward_model_name_or_path"


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out prompts. rest: the other prompts of the data, or None. Prompts are numbered with the rest first.
    environments: those of all prompts, or None without --environment."""

    prompts: Prompts
    rest: Prompts | None
    tokenizer: PreTrainedTokenizerBase
    environments: Environments | None = None

    @property
    def parts(self) -> list[Prompts]:
        """All prompts, in the order of their numbers."""
        return [prompts for prompts in (self.rest, self.prompts) if prompts is not None]

    @property
    def first_index(self) -> int:
        """The number of the first held-out prompt."""
        return len(self.rest) if self.rest is not None else 0


def check_answering(args: MeasuringFlags, path: str, what: str) -> None:
    """Raise UserError if the model at `path` cannot answer prompts of these lengths on this machine. what: the flag
    that gives the path, for the message."""
    trusted = args.trust_remote_code
    config = check_policy(path, what, trusted)
    check_embedding(args.read_tokenizer(path, what), config, path, what)
    check_decoding(path, what, trusted)
    args.check_attention(path, LANGUAGE_MODEL, what)
    check_positions(config, f"{what} {path}", **prompt_and_answer(args))


def check_scoring(args: MeasuringFlags) -> None:
    """Raise UserError if the environment cannot be loaded, or if a reward model cannot score on this machine.
    `read_held_out` checks what the models read."""
    load_environment(args)
    for path in args.reward_model_name_or_path:
        check_scorer(path, REWARD_MODEL, args.trust_remote_code)
        args.check_attention(path, CLASSIFIER, REWARD_MODEL)


def read_held_out(args: MeasuringFlags, tokenizer) -> HeldOut:
    """Read the held-out prompts, which are the ones that step 3 would have with the same data flags.

    Raises: UserError if data do not exist or cannot be read, if there are too few prompts, if a reward model cannot
    read them, or if the environment fails with the first row.
    """
    models, trusted = args.reward_model_name_or_path, args.trust_remote_code
    texts = [path for path in models if reads_texts(tokenizer, path, REWARD_MODEL, trusted)]
    load_environment(args, texts)
    rest, held_out, _ = read_prompts(args, tokenizer, texts)
    assert held_out is not None, "load_rows gives as many as are asked for, or says that they are too few"
    lines = check_reward_texts(args, args.reward_model_name_or_path, tokenizer, by_part(held_out, None))
    for line in lines if distributed.is_main() else ():
        print(line, flush=True)
    return HeldOut(held_out, rest, tokenizer, environments_of(args, tokenizer, [rest, held_out]))


def functions_of(args: RewardsFlags) -> dict[str, Callable]:
    """{value of the flag: reward function}. Raises: UserError if a function cannot be loaded."""
    return {given: load_given(given, args, flag) for given, flag in args.functions.items()}


def reward_names(args: RewardsFlags) -> list[str]:
    """A name for each reward: the name of its model's folder, with the folder that it is in if several models have the
    same, or of its function; "server" for the reward servers, "environment" for the environment's. If two rewards would
    have the same name, a number is added."""
    found: list[str] = []
    folders = [Path(path) for path in args.reward_model_name_or_path]
    short = [folder.name for folder in folders]
    models = ["/".join(folder.parts[-2:]) if short.count(folder.name) > 1 else folder.name for folder in folders]
    functions = [re.sub(r"\W", "_", given.rpartition(":")[2]) for given in args.functions]
    others = [*functions, *([SERVER] if args.reward_url else []), *([ENVIRONMENT] if args.environment else [])]
    for name in [*models, *others]:
        same = sum(other == name or other.startswith(f"{name} (") for other in found)
        found.append(f"{name} ({same + 1})" if same else name)
    return found


def check_rewards(args: ServerFlags, functions: Mapping[str, Callable], held_out: HeldOut) -> None:
    """Raise UserError if a function or a reward server cannot score responses to these prompts."""
    parts = {"the held-out prompts": held_out.prompts}
    check_columns(functions, parts)
    check_server(args, held_out.tokenizer, parts)


class Measuring:
    """Holds the engines for measuring finished models.

    reference: the model at `spec.actor_path`, to which the KL is measured. texts: what turns responses into texts.
    rewards: the sources of the reward models' scores, in the order in which the flag gives them. policies: the folders
    of the models that answer, which name their end tokens.
    """

    def __init__(self, args: MeasuringFlags, spec: EngineSpec, held_out: HeldOut, policies: Sequence[str]):
        init()
        self.args = args
        self.spec = spec
        self.held_out = held_out
        self.group = RankGroup(spec.attention.ranks)
        self.reference = self.loaded(spec.actor_path, "reference")
        tokenizer, trusted = held_out.tokenizer, args.trust_remote_code
        self.texts = Texts.of(
            held_out.parts,
            tokenizer,
            stops={stop for path in policies for stop in generation_stops(path, tokenizer, trusted)},
            cut_responses=args.cut_responses,
            longest=args.max_prompt_seq_len + args.max_answer_seq_len,
            rows_at_once=args.per_device_eval_batch_size,
            trust_remote_code=trusted,
        )
        how = self.texts, args.max_reward_seq_len, args.reward_step_end
        self.rewards = [
            reward_source(RewardModel(self.loaded(path, "reward", load_scorer)), path, *how)
            for path in args.reward_model_name_or_path
        ]

    def side_by_side(self, args: RewardsFlags) -> CombinedReward:
        """All rewards, called as `reward_names` says. The first one is the score. The others have weight 0, so they are
        measured without changing the score."""
        tokenizer, rows, server = self.held_out.tokenizer, self.texts.rows, args.reward_server()
        sources: list[RewardSource] = [
            *self.rewards,
            *(function_source(function, given, tokenizer, rows) for given, function in functions_of(args).items()),
            *([ServerReward(server, tokenizer, rows)] if server else []),
            *([EnvironmentReward()] if args.environment else []),
        ]
        named = zip(reward_names(args), sources, strict=True)
        return CombinedReward({name: (source, float(source is sources[0])) for name, source in named})

    def loaded(self, path: str, role: str, load: Callable = load_policy) -> FrozenModel:
        """Load the model at `path` into an engine, with the configuration that the specification has for this role."""
        model = frozen_model(load, path, getattr(self.spec, role), self.spec)
        model.module.split(self.group)
        return model

    def rollouts_of(self, policy: FrozenModel, decoding: str = "plain") -> RolloutBackend:
        """The backend that draws responses from a policy, or conversations with the environment. decoding: as in
        Sampler."""
        rewards = [model for reward in self.rewards for model in reward.models]
        rollouts = build_rollouts(
            "auto",
            policy,
            self.held_out.tokenizer,
            others=[model for model in (self.reference, *rewards) if model is not policy],
            rows_at_once=self.args.per_device_eval_batch_size,
            row_length=self.args.max_prompt_seq_len + self.args.max_answer_seq_len,
            decoding=decoding,
        )
        return conversations(self.args, rollouts, self.held_out.environments)

    def evaluator_of(
        self,
        policy: FrozenModel,
        path: str,
        reward: RewardSource,
        rollouts: RolloutBackend,
        *,
        forward_passes: bool = False,
        greedy: bool = False,
        samples: int = 1,
    ) -> Evaluator:
        """Make the Evaluator that has this policy answer the held-out prompts.

        Args:
            path: the policy's folder, whose generation_config names the tokens that end a response.
            reward: the source of scores. rollouts: the backend that draws responses from the policy.
            forward_passes: whether log-probs always come from a forward pass. If not, the sampler's are used if they
                equal those of a forward pass within rounding.
            greedy: whether the most likely token is taken; if so, log-probs are at temperature 1.
            samples: number of responses to each prompt.
        """
        tokenizer, dialect = self.held_out.tokenizer, dataclasses.replace(DIALECT, temperature=self.args.temperature)
        algorithm = Algorithm(
            dialect, pad_token_id=tokenizer.pad_token_id, end_token_id=end_token_id(tokenizer, dialect)
        )
        maker = ExperienceMaker(
            actor=policy,
            critic=None,
            reference=Reference(self.reference),
            reward=reward,
            algorithm=algorithm,
            micro_batch_size=self.args.per_device_eval_batch_size,
            exact_sampler=not forward_passes and self.args.dtype == "fp32" and rollouts.computes_as_actor,
            padded=not policy.module.packs,
            group=self.group,
        )
        sampling = SamplingConfig.of(
            dialect,
            generation_stops(path, tokenizer, self.args.trust_remote_code),
            str(self.args.dtype),
            max_new_tokens=self.args.max_answer_seq_len,
            pad_token_id=tokenizer.pad_token_id,
            stop_strings=tuple(self.args.stop),
            seed=self.args.seed,
            vocabulary_size=vocabulary_size(tokenizer),
        )
        return Evaluator(
            self.held_out.prompts,
            rollouts=rollouts,
            experience_maker=maker,
            sampling=dataclasses.replace(sampling, temperature=0.0) if greedy else sampling,
            tokenizer=tokenizer,
            first_index=self.held_out.first_index,
            samples=samples,
        )


def tell_failures(metrics: Mapping[str, float]) -> None:
    """Print in which share of the conversations the environment failed, if in any. metrics: those of an Evaluator."""
    if distributed.is_main() and (share := metrics.get("eval/environment_errors")):
        print(f"the environment failed in {share:.1%} of the responses", flush=True)


def check_same_tokens(one: tuple[str, str], other: tuple[str, str], why: str, trust_remote_code: bool = False) -> None:
    """Raise UserError if the vocabularies of two models differ. one, other: (flag, path) of each model.

    why: the last sentence of the message, which says what to do.
    """
    (own_flag, own_path), (flag, path) = one, other
    own, found = (
        read_tokenizer(place, name, trust_remote_code=trust_remote_code).get_vocab() for name, place in (one, other)
    )
    if own != found:
        differing = sorted(token for token in own.keys() | found.keys() if own.get(token) != found.get(token))
        raise UserError(
            f"{flag} {path}: its vocabulary differs from that of {own_flag} {own_path} ({len(found)} and {len(own)} "
            f"tokens; {listed(differing)}). {why}"
        )
