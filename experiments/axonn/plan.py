"""Parameters of a model that nobody makes, and the activations of a stage of it."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from hpcjax import cost, runs
from hpcjax.core import config
from hpcjax.models import CausalLmConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A language model on a pipeline, in half precision.

    Attributes:
      model: the model.
      vocabulary: its words.
      context: tokens of a sequence.
      stages: of the pipeline, with as many micro-batches in flight.
      rows: sequences of a micro-batch.
      remat_every: blocks that are computed again together.
      seed: is not used.
    """

    smoke: ClassVar[Mapping[str, str]] = {"model.width": "8", "model.heads": "2"}
    figures: ClassVar[Mapping[str, str]] = {
        "parameters": ": of the model",
        "gib": ": of a stage's activations",
    }

    model: CausalLmConfig = CausalLmConfig()
    vocabulary: config.Size = 51_200
    context: config.Size = 512
    stages: config.Size = 6
    rows: config.Size = 1
    remat_every: config.Size = 4
    seed: config.Seed = 0


@runs.analytical
def run(cfg: Config) -> "runs.Figures":
    """Counts parameters by shapes alone."""
    import jax

    from hpcjax import core

    model = cfg.model.make((cfg.context,), cfg.vocabulary, core.Policy())
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    activations = cost.stage_activations(
        cfg.model.depth // cfg.stages,
        cfg.model.width,
        rows=cfg.rows,
        time=cfg.context,
        heads=cfg.model.heads,
        in_flight=cfg.stages,
        remat_every=cfg.remat_every,
        itemsize=2,
    )
    return {
        "parameters": float(core.trees.num_params(shapes)),
        "gib": activations / 2**30,
    }
