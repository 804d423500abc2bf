"""Run by ranks: three training steps, and what the weights of all engines were before, during and after them."""

from torch import Tensor

from engine.reference import EMA
from engine.zero.engines import TrainedModel
from tests.distributed.tiny_run import TinyPrompts, build_trainer, engine_spec, prompt_batch, timeless
from tests.engine.zero.inspecting import masters, partitioned, weights

EMA_DECAY = 0.9


def all_runs(folder: str, runs: dict[str, dict]) -> dict[str, dict]:
    """`one_run` of each set of arguments, by the same names."""
    return {name: one_run(folder, **arguments) for name, arguments in runs.items()}


def one_run(folder: str, stage: int, config: str, dtype: str = "fp32") -> dict:
    """Train three steps of 12 prompts in two generation batches, with an EMA."""
    trainer = build_trainer(engine_spec(folder, stage, config=config, dtype=dtype, ema_decay=EMA_DECAY))
    engine = trainer.models
    frozen = {"reference": engine.reference.model, "reward": engine.reward.model}
    result = {
        "before": {name: weights(model) for name, model in frozen.items()},
        "critic": weights(engine.critic),
        "actor_after_steps": [masters(engine.actor)],
    }
    _watch_updates(engine.ema, result["actor_after_steps"])
    reports = list(trainer.fit(TinyPrompts(12)))
    result["metrics"] = [timeless(report.metrics) for report in reports]
    result["experience"] = reports[0].batch
    result["after"] = {name: weights(model) for name, model in frozen.items()}
    everyone = {"actor": engine.actor, "critic": engine.critic, **frozen}
    result["at_rest"] = {name: partitioned(model) for name, model in everyone.items()}
    result |= swapped(engine.actor, engine.ema)
    result["at_rest_after_swap"] = partitioned(engine.actor)
    return result


def _watch_updates(ema: EMA, log: list) -> None:
    def update():
        EMA.update(ema)
        log.append(masters(ema.actor))

    ema.update = update


def swapped(actor: TrainedModel, ema: EMA) -> dict:
    """Masters, weights, log-probs and the EMA's shards before, within and after `ema.swapped`."""

    def now() -> dict:
        return {"masters": masters(actor), "weights": weights(actor), "logprobs": _logprobs(actor)}

    shards = [shard.clone() for shard in ema.means]
    before = now()
    with ema.swapped():
        within = now()
    return {
        "before_swap": before,
        "within_swap": within,
        "after_swap": now(),
        "shards_before_swap": shards,
        "shards_after_swap": ema.means,
    }


def _logprobs(actor: TrainedModel) -> Tensor:
    """Of the last token of four prompts."""
    prompts = prompt_batch([0, 1, 2, 3])
    positions = prompts.attention_mask.cumsum(-1) - prompts.attention_mask
    return actor(prompts.input_ids, prompts.attention_mask, positions, response_length=1)[0].detach()
