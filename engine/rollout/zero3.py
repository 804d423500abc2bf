"""Rollouts through the partitioned engine itself: no second copy of the weights, but each token gathers every layer."""
from engine import distributed
from engine.ds_engine import TrainedModel
from engine.experience import PromptBatch, Rollout
from engine.rollout.base import SamplingConfig
from engine.rollout.decode import decode, stop_finder


class Zero3Rollouts:
    """Generates with the actor's own module, under ZeRO's hooks. Slow; for actors that fit no device as a whole."""

    def __init__(self, actor: TrainedModel, tokenizer):
        self.actor, self.tokenizer = actor, tokenizer

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """One response for each row; ranks go on together until the last row of all has ended."""
        find_stop = stop_finder(self.tokenizer, sampling.stop_strings)
        learning = self.actor.engine.training
        self.actor.engine.eval()
        try:
            return decode(self.actor.module.model, prompts, sampling, find_stop, any_alive=distributed.any_rank)
        finally:
            self.actor.engine.train(learning)
