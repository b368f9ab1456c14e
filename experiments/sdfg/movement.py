"""Words and times of JAX functions as graphs, before and after fusion."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from hpcjax import runs
from hpcjax.core import config

# Those whose words are counted by hand, and those that products bound.
COUNTED, BOUND = ("softmax", "norm", "jacobi"), ("mlp", "attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Functions of matrices.

    Attributes:
      rows: of the softmax and the norm.
      width: their columns.
      grid: rows and columns of the Jacobi sweeps.
      hidden: width of the multilayer perceptron and of the attention.
      tokens: rows of these.
      repetitions: rounds in which times are taken.
      seed: of the values.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        **{"rows": "8", "width": "6", "grid": "8", "hidden": "4", "tokens": "6"},
        "repetitions": "2",
    }
    figures: ClassVar[Mapping[str, str]] = {
        name: f"program: {what}"
        for name, what in {
            "listed": "words of its list of operators, over the largest argument's",
            "simplified": "the same of the graph, simplified",
            "fused": "the same with maps fused",
            "kernels": "the same of the list, as kernels that also join reductions",
            "kept": "the same with maps fused that still write what lies between",
            "off": "words between the fused graph and the count by hand; 0 without one",
            "off_simplified": "the same of the simplified graph",
            "off_kept": "the same of the one that writes what lies between",
            "apart": "largest difference of the fused graph's results from JAX's",
            "rounded": "the same if arguments are rounded to bfloat16",
            "apart_ms": "ms, the graph node by node",
            "fused_ms": "ms, the fused graph node by node",
            "jit_ms": "ms, JAX's compiled function",
        }.items()
    }

    rows: config.Size = 4096
    width: config.Size = 1024
    grid: config.Size = 2048
    hidden: config.Size = 512
    tokens: config.Size = 1024
    repetitions: config.Size = 7
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns the programs."""
        return {"program": (*COUNTED, *BOUND)}


@runs.measured
def run(cfg: Config) -> "runs.Figures":
    """Reads, rewrites, compares and times every function."""
    from experiments.sdfg import functions

    rng = np.random.default_rng(cfg.seed)
    rows = []
    for fn, shapes, hand in functions.find(cfg).values():
        args = [np.asarray(rng.normal(size=each), "float32") for each in shapes]
        rows.append(functions.measure(fn, args, hand, cfg.repetitions))
    return {name: [row[name] for row in rows] for name in rows[0]}
