"""Rollouts from a plain copy of the actor: weights are gathered once per update, tokens cost no communication."""
import torch
from torch import nn

from engine import distributed
from engine.ds_engine import TrainedModel, gathered_params, parameter_buckets
from engine.experience import PromptBatch, Rollout
from engine.model_files import empty_policy
from engine.rollout.base import SamplingConfig
from engine.rollout.decode import decode, stop_finder


class ReplicaRollouts:
    """Generates with a module without hooks, in the actor's dtype.

    At ZeRO stages 0 to 2 the actor's own module is such a module, and is used as it is. At stage 3 a second module
    holds the gathered weights, refreshed when the actor's have changed.
    """

    def __init__(self, actor: TrainedModel, tokenizer):
        self.actor, self.tokenizer = actor, tokenizer
        self._copy: nn.Module | None = None
        self._version = -1

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """One response for each row; ranks do not wait for each other."""
        find_stop = stop_finder(self.tokenizer, sampling.stop_strings)
        model = self._current()
        learning = model.training
        model.eval()
        try:
            return decode(model, prompts, sampling, find_stop, any_alive=lambda alive: alive)
        finally:
            model.train(learning)

    def _current(self) -> nn.Module:
        own = self.actor.module.model
        if self.actor.stage < 3:
            return own
        if self._copy is None:
            dtype = next(own.parameters()).dtype
            self._copy = empty_policy(own.config, dtype, distributed.device()).model
        if self._version != self.actor.version:
            self._gather(own, self._copy)
            self._version = self.actor.version
        return self._copy

    @staticmethod
    @torch.no_grad()
    def _gather(source: nn.Module, target: nn.Module) -> None:
        parameters, buffers = dict(target.named_parameters()), dict(target.named_buffers())
        for bucket in parameter_buckets(source):
            with gathered_params([parameter for _, parameter in bucket]):
                for name, parameter in bucket:
                    parameters[name].copy_(parameter)
        for name, buffer in source.named_buffers():
            buffers[name].copy_(buffer)
