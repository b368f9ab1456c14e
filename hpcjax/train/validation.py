"""Validation: means over the held-out part, by the training run's own programs."""

import collections
import logging
import math
from collections.abc import Callable, Iterable, Iterator

import jax
from jax.sharding import Mesh

from hpcjax import data
from hpcjax.core.method import Batch, Totals
from hpcjax.sharding.mesh import place_batch
from hpcjax.train.config import TrainConfig
from hpcjax.train.state import TrainState
from hpcjax.train.step import eval_step
from hpcjax.train.stopwatch import Stopwatch
from hpcjax.train.task import Task

log = logging.getLogger(__name__)


def make_validator(
    task: Task, config: TrainConfig, mesh: Mesh, watch: Stopwatch
) -> Callable[[TrainState, int], dict[str, float]]:
    """Returns a function `(state, step)` that returns means over the validation set.

    Their names begin with `val_`. Sums of batches are added in float64 on the host, so
    that means depend on the batch size only by float32 rounding within a batch. A
    worker in a process of its own scores its own model, on all of the set.
    """
    score = task.once(("validation", mesh), lambda: eval_step(task, mesh))
    shard, around = (jax.process_index(), jax.process_count()), task.method.around

    def look(state: TrainState, batches: Iterable[Batch]) -> Iterator[Totals]:
        view = around.view(state)
        for params, seen in map(view, batches):
            placed = place_batch(seen, mesh, task.method.batch)
            yield score(params, state.model_state, placed)

    def validate(state: TrainState, step: int) -> dict[str, float]:
        sums: dict[str, float] = collections.defaultdict(float)
        count = 0.0
        whole = data.evaluation_batches(
            task.dataset.validation, config.batch_size, shard=shard
        )
        with watch.pause("validation"):
            if around.score is None:
                each = look(state, watch.watch_validation(whole, step))
            else:
                each = watch.watch_validation(around.score(state, whole), step)
            for totals in filter(None, map(jax.device_get, each)):
                count += float(totals.count)
                for name, value in totals.sums.items():
                    sums[name] += float(value)
        # There is no mean where nothing has weight, as where all labels are ignored.
        means = {
            f"val_{name}": total / count if count else math.nan
            for name, total in sums.items()
        }
        lost = [name for name, mean in means.items() if not math.isfinite(mean)]
        if lost:
            log.warning("step %d: the validation is not finite: %s", step, lost)
        return means

    return validate
