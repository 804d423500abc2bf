"""Every model's responses to the held-out prompts, scored, with their KL to the first model.

The first model stays loaded, since it is asked for log-probs of all others' responses. The others take turns: weights
of one architecture are put into one engine, each read once; a model of another one gets an engine of its own.
"""

import gc
import re
from collections.abc import Callable
from pathlib import Path

import torch

from engine.models.loading import load_policy, load_scorer
from engine.models.places import base_of
from engine.models.reading import read_config
from engine.models.weight_files import weights_folder
from engine.reference import EngineReference
from engine.reward.base import RewardSource
from engine.reward.combined import CombinedReward
from engine.reward.model import RewardModel
from engine.rlhf_engine import frozen_model
from engine.rollout import RolloutBackend
from engine.zero.accelerator import on_gpu
from engine.zero.communication import init
from engine.zero.config import EngineConfig
from engine.zero.engines import FrozenModel
from engine.zero.gathering import full_shape
from training.compare.flags import CompareFlags
from training.compare.measures import Sample
from training.compare.models import Model
from training.flags.reward_functions import load_given
from training.flags.user_function import function_source
from training.measuring import HeldOut, evaluator_of, rollouts_of, stored_names
from training.merge.weights import stored_weights

OF_FILES = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"}
"""What configurations of one architecture may differ in."""


class Answering:
    """The first model, what scores, and one engine for the others.

    rewards: names, in the order of the flags.
    """

    def __init__(self, args: CompareFlags, held_out: HeldOut, first: Model):
        init()
        self.args, self.held_out, self.first = args, held_out, first
        self.spec = args.spec_of(first.path)
        self.rewards = reward_names(args)
        self.reference = self._loaded(first, "reference")
        config = EngineConfig("reward", args.zero_stage)
        self.scorers = [frozen_model(load_scorer, path, config, self.spec) for path in args.reward_models]
        self.reward = self._reward()
        self.policy: FrozenModel | None = None
        self.rollouts: RolloutBackend | None = None

    def samples(self, model: Model) -> tuple[list[str], list[Sample]]:
        """The prompts, and a model's samples by prompt and then by number, the same on all ranks (all call this).

        Raises: RunStopped for scores or KL that are not finite.
        """
        policy = self._policy(model)
        if self.rollouts is None:
            others = [one for one in (self.reference, *self.scorers) if one is not policy]
            self.rollouts = rollouts_of(self.args, policy, self.held_out.tokenizer, others, decoding="auto")
        evaluator = evaluator_of(
            self.args,
            policy,
            EngineReference(self.reference),
            self.reward,
            self.held_out,
            model.path,
            self.rollouts,
            forward_passes=True,
            greedy=self.args.greedy,
            samples=self.args.num_samples_per_prompt,
        )
        answers = evaluator.answers(1)
        samples = [
            Sample(
                response=row["response"],
                scores={name: row[f"reward_{place}"] for place, name in enumerate(self.rewards)},
                kl=row["kl"],
                tokens=row["tokens"],
                ended=ended,
            )
            for row, ended in zip(answers.rows, answers.ended, strict=True)
        ]
        return [row["prompt"] for row in answers.rows[:: evaluator.samples]], samples

    def _reward(self) -> RewardSource:
        """All rewards; the score is the first one's, the others are measured beside it."""
        tokenizer, rows = self.held_out.tokenizer, self.held_out.rows
        sources: list[RewardSource] = [
            *(RewardModel(scorer) for scorer in self.scorers),
            *(function_source(function, given, tokenizer, rows) for given, function in functions_of(self.args).items()),
        ]
        return CombinedReward({str(place): (source, float(place == 0)) for place, source in enumerate(sources)})

    def _policy(self, model: Model) -> FrozenModel:
        """An engine with this model's weights."""
        if model == self.first:
            return self.reference
        if self.policy is None or not self._taken(self.policy, model):
            self.policy = self.rollouts = None
            for one in (self.reference, *self.scorers):
                one.copies = None  # which may hold the weights of the engine that goes
            gc.collect()
            if on_gpu():
                torch.cuda.empty_cache()
            self.policy = self._loaded(model, "actor")
        return self.policy

    def _loaded(self, model: Model, role: str) -> FrozenModel:
        return frozen_model(load_policy, model.path, EngineConfig(role, self.args.zero_stage), self.spec)

    def _taken(self, policy: FrozenModel, model: Model) -> bool:
        """Whether the engine could take this model's weights in place of its own, and has done so."""
        trusted, module = self.args.trust_remote_code, policy.module.model
        config = read_config(model.path, model.what, trusted)
        if _architecture(config) != _architecture(module.config) or not weights_folder(base_of(model.path, model.what)):
            return False
        weights = stored_weights(model.path, model.what, trusted)
        names = stored_names(module, weights)
        if names is None or any(weights[names[name]].shape != full_shape(p) for name, p in module.named_parameters()):
            return False
        policy.take(lambda name: weights[names[name]])
        return True


def _architecture(config) -> dict:
    return {name: value for name, value in config.to_dict().items() if name not in OF_FILES}


def reward_names(args: CompareFlags) -> list[str]:
    """How each reward is called: by its model's folder, or its function; with a number where another has the name."""
    found: list[str] = []
    functions = [re.sub(r"\W", "_", given.rpartition(":")[2]) for given in args.reward_function]
    for name in [*(Path(path).name for path in args.reward_models), *functions]:
        same = sum(other == name or other.startswith(f"{name} (") for other in found)
        found.append(f"{name} ({same + 1})" if same else name)
    return found


def functions_of(args: CompareFlags) -> dict[str, Callable]:
    """The reward functions, as they are given. Raises: UserError for one that cannot be loaded."""
    return {given: load_given(given, args) for given in args.reward_function}
