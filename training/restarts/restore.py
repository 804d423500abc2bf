"""Models put back to a restart point, on any number of ranks and at any ZeRO stage."""

from collections.abc import Mapping
from pathlib import Path

from engine.ema import EMA
from engine.zero.engines import TrainedModel
from training.restarts.layout import EMA as EMA_FOLDER
from training.restarts.layout import REFERENCE
from training.restarts.resume_point import ResumePoint
from training.restarts.shard_files import ShardFiles


def restore(
    point: ResumePoint, models: Mapping[str, TrainedModel], ema: EMA | None = None, reference: EMA | None = None
) -> list[str]:
    """Give models, moving average and a reference that is refreshed the numbers of a restart point (all ranks call
    this).

    A run that keeps an average, of a point that has none, begins it with the point's weights. Returns what is to be
    said of that. Raises: UserError where the point is of other models.
    """
    for name, model in models.items():
        model.load_shards(ShardFiles(Path(point.folder) / name), point.state["models"].get(name, {}))
    if reference is not None:
        reference.load_shards(ShardFiles(point.folder / REFERENCE))
    if ema is None:
        return []
    if point.state["ema"]:
        ema.load_shards(ShardFiles(point.folder / EMA_FOLDER))
        return []
    for mean, weights in zip(ema.means, ema.actor.master_shards(), strict=True):
        mean.copy_(weights)
    return ["changed since the restart point: --enable_ema; the average begins with the weights of the restart point"]
