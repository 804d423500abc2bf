"""Rollouts through the partitioned engine itself: no second copy of the weights, but each token gathers every layer."""
from engine import distributed
from engine.ds_engine import TrainedModel
from engine.experience import PromptBatch, Rollout
from engine.rollout.base import SamplingConfig
from engine.rollout.decode import Sampler


class Zero3Rollouts:
    """Generates with the actor's own module, under ZeRO's hooks. Slow; for actors that fit no device as a whole."""
    why = ""  # what a choice among backends went by

    def __init__(self, actor: TrainedModel, tokenizer, rows_at_once: int | None = None):
        self.actor = actor
        self.sampler = Sampler(tokenizer, rows_at_once, agree=distributed.largest)

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """One response for each row; ranks go on together until the last row of all has ended."""
        learning = self.actor.engine.training
        self.actor.engine.eval()
        try:
            return self.sampler.responses(self.actor.module.model, prompts, sampling)
        finally:
            self.actor.engine.train(learning)

    def rest(self) -> None:
        """Nothing is held here but the cache, which is used again."""
