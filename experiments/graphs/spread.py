"""How long it takes to add up what vertices receive: segments or a sparse matrix."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from hpcjax import graphs, perf, runs
from hpcjax.core import config

NAMES = ("segments", "BCOO", "shuffled edges", "cumulative sums")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A graph whose in-degrees have a long tail, and how the sums are measured.

    Attributes:
      vertices: of the graph.
      edges: of it, mean in-degree `edges / vertices`.
      width: features of a vertex.
      repetitions: rounds of the measurement.
      seed: of edges and features.
    """

    smoke: ClassVar[Mapping[str, str]] = {"vertices": "50", "repetitions": "2"}
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "candidate repetition: of a sum over edges",
        "distance": "candidate: of a sum from the same in float64, over the largest",
    }

    vertices: config.Size = 60_000
    edges: config.Size = 300_000
    width: config.Size = 64
    repetitions: config.Size = 20
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"candidate": NAMES, "repetition": range(self.repetitions)}


def run(cfg: Config, ctx: "runs.Context | None") -> "runs.Dataset":
    """Times candidates in turns."""
    import jax

    del ctx
    rng = np.random.default_rng(cfg.seed)
    graph = graphs.make_graph(
        rng.integers(0, cfg.vertices, cfg.edges),
        (cfg.vertices * rng.random(cfg.edges) ** 2).astype(int),
        cfg.vertices,
    )
    x = rng.normal(size=(cfg.vertices, cfg.width)).astype(np.float32)
    weights = rng.random(cfg.edges).astype(np.float32)
    exact = np.zeros(x.shape)
    np.add.at(exact, graph.receivers, weights[:, None] * x[graph.senders].astype(float))
    programs = {
        name: jax.jit(candidate) for name, candidate in _candidates(graph, rng).items()
    }
    given = jax.device_put((x, weights))
    distance = [
        np.abs(np.asarray(program(*given)) - exact).max() / np.abs(exact).max()
        for program in programs.values()
    ]
    thunks = {name: _bind(program, given) for name, program in programs.items()}
    timed = perf.compare(thunks, "BCOO", repetitions=cfg.repetitions, warmup=1)
    return runs.measured(
        {"seconds": timed["seconds"], "distance": ("candidate", distance)}
    )


def _bind(program: Callable[..., Any], given: Any) -> Callable[[], Any]:
    return lambda: program(*given)


def _candidates(
    graph: "graphs.Graph", rng: np.random.Generator
) -> dict[str, Callable[..., Any]]:
    """Returns functions of x and weights that return Σ w x of each receiver."""
    import jax.numpy as jnp
    from jax.experimental import sparse

    ends = np.stack([graph.receivers, graph.senders], 1)
    order = rng.permutation(len(ends))
    last = np.searchsorted(graph.receivers, np.arange(graph.vertices + 1))

    def by_matrix(x: Any, weights: Any) -> Any:
        shape = (graph.vertices, graph.vertices)
        entries = (weights, jnp.asarray(ends))
        matrix = sparse.BCOO(entries, shape=shape, indices_sorted=True)
        return matrix @ x

    def shuffled(x: Any, weights: Any) -> Any:
        taken = weights[order, None] * x[graph.senders[order]]
        return graphs.segment_sum(taken, graph.receivers[order], graph.vertices)

    def by_differences(x: Any, weights: Any) -> Any:
        total = jnp.cumsum(weights[:, None] * x[graph.senders], 0)
        ends = jnp.concatenate([jnp.zeros_like(total[:1]), total])[last]
        return ends[1:] - ends[:-1]

    made = (
        lambda x, weights: graphs.spread(graph, x, weights),
        by_matrix,
        shuffled,
        by_differences,
    )
    return dict(zip(NAMES, made, strict=True))
