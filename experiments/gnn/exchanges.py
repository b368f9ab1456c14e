"""A graph layer on parts of a graph: what its compiled programs send, by scheme."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from hpcjax import graphs, runs
from hpcjax.core import checks, config

GRAPHS = "digits", "cora"
METHODS = "hash", "contiguous", "rcm", "label_propagation"
COLUMNS = "features"
SCHEMES = "halo", "all_to_all", "allgather", COLUMNS
PASSES = "forward", "with slopes"
UNTOLD, TOLD = PEERS = "compiler", "compiler, told to gather"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Graphs cut into parts, a device each.

    Attributes:
      parts: numbers of devices.
      names: of the graphs.
      width: features of a vertex.
      missing: leaves out what one part needs of one vertex: the control.
      seed: of features and of the methods.
    """

    smoke: ClassVar[Mapping[str, str]] = {"parts": "[1]", "names": '["digits"]'}
    figures: ClassVar[Mapping[str, str]] = {
        "sent": "graph parts method scheme pass: bytes of a device's collectives",
        "rule": "graph parts method scheme pass: analytical: of the formula",
        "passed": "graph parts method scheme: analytical: rows through all devices' "
        "links over those of an all-gather without padding",
        "missed": "graph parts method scheme: of distinct pairs of a part and a remote "
        "neighbour, counted by hand, those that tables have not",
        "distance": "graph parts method scheme: of outputs and slopes from one "
        "device's, relative",
        "cut": "graph parts method: analytical: share of the edges",
        "imbalance": "graph parts method: analytical: the largest part over the mean",
        "compiler": "graph parts peer: rows through links, as `passed`, of the whole "
        "graph's program with rows of vertices cut over devices",
    }

    parts: tuple[config.Size, ...] = (2, 4, 8)
    names: tuple[str, ...] = GRAPHS
    width: config.Size = 16
    missing: bool = False
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "width must be divided by all parts, which have slices of columns"
        checks.require(not any(self.width % p for p in self.parts), rule, **vars(self))

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        own = {"graph": self.names, "parts": self.parts, "pass": PASSES}
        return {**own, "method": METHODS, "scheme": SCHEMES, "peer": PEERS}


@runs.simulated
def run(cfg: Config) -> "runs.Figures":
    """Compiles a layer and its slopes for all graphs, parts, methods and schemes."""
    first = len(cfg.names), len(cfg.parts), len(METHODS), len(SCHEMES)
    sizes = dict(zip(("graph", "parts", "method", "scheme"), first, strict=True))
    found: dict[str, Any] = {}
    for name, text in cfg.figures.items():
        dims = text.partition(":")[0].split()
        found[name] = np.zeros([sizes.get(dim, len(PASSES)) for dim in dims])
    for i, j in np.ndindex(first[:2]):
        layer = _Layer(draw(cfg.names[i]), cfg.parts[j], cfg)
        found["compiler"][i, j] = [
            layer.of_the_compiler(told) for told in (False, True)
        ]
        for at, method in enumerate(METHODS):
            for to, scheme in enumerate(SCHEMES):
                for name, value in layer.measure(method, scheme).items():
                    own = found[name][i, j, at]
                    if own.ndim:
                        own[to] = value
                    else:
                        found[name][i, j, at] = value
    return found


def draw(name: str) -> "graphs.Graph":
    """Returns a graph: ten nearest neighbours of digits, or Cora's citations."""
    if name == "cora":
        from hpcjax.data import CoraConfig

        graph: Any = CoraConfig().load().graph
        return graphs.make_graph(graph.senders, graph.receivers, graph.vertices)
    from sklearn.datasets import load_digits
    from sklearn.neighbors import kneighbors_graph
    from threadpoolctl import threadpool_limits

    digits: Any = load_digits()
    # Which of equally near scans are taken depends on how many threads search.
    with threadpool_limits(1):
        near: Any = kneighbors_graph(digits.data / 16, 10)
    near = near.tocoo()
    return graphs.symmetrize(graphs.make_graph(near.col, near.row, near.shape[0]))


def count_pairs(graph: "graphs.Graph", owner: np.ndarray, parts: int) -> np.ndarray:
    """Returns how many vertices of one part send to another one, [from, to]."""
    found = np.zeros((parts, parts), int)
    ends = zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True)
    for vertex, part in {(u, int(owner[v])) for u, v in ends if owner[u] != owner[v]}:
        found[owner[vertex], part] += 1
    return found


def _without_one(graph: "graphs.Graph", owner: np.ndarray) -> "graphs.Graph":
    """Returns the graph without the edges of one vertex to another part."""
    to = owner[graph.receivers]
    at = int(np.argmax(owner[graph.senders] != to))
    kept = (graph.senders != graph.senders[at]) | (to != to[at])
    return graphs.make_graph(graph.senders[kept], graph.receivers[kept], graph.vertices)


class _Layer:
    """A graph convolution with slopes of its inputs, whole and in parts."""

    def __init__(self, graph: "graphs.Graph", parts: int, cfg: Config) -> None:
        from hpcjax import sharding

        rng = np.random.default_rng(cfg.seed)
        self.graph, self.parts, self.cfg = graphs.add_self_loops(graph), parts, cfg
        self.mesh = sharding.make_mesh({"data": parts})
        draws = rng.normal(size=(2, graph.vertices, cfg.width)).astype(np.float32)
        self.x, self.slope = draws
        kernel = rng.normal(size=(cfg.width, cfg.width)).astype(np.float32)
        self.params: Any = {"kernel": kernel, "bias": np.zeros(cfg.width, np.float32)}
        self.degrees = np.bincount(self.graph.receivers).astype(np.float32)
        self.every = graph.vertices * (parts - 1) or 1  # rows of an all-gather

    def measure(self, method: str, scheme: str) -> dict[str, Any]:
        """Returns the figures of one partition and scheme."""
        import jax

        from hpcjax import perf

        seed, p = self.cfg.seed, self.parts
        owner = graphs.partition(self.graph, p, method, seed=seed).owner
        pairs = count_pairs(self.graph, owner, p)
        graph = _without_one(self.graph, owner) if self.cfg.missing else self.graph
        way: Any = "halo" if scheme == COLUMNS else scheme
        cut = graphs.partition(graph, p, owner, way)
        given, make, join = self._cut(cut), self._in_parts, cut.join
        if scheme == COLUMNS:
            given, make = self._cut_columns(cut), self._in_columns
            join = functools.partial(_join_columns, cut)
        programs = [
            jax.jit(make(cut, slopes)).lower(*given).compile()
            for slopes in (False, True)
        ]
        outputs = [join(each) for each in programs[1](*given)]
        block, longest = int(cut.sizes.max()), int(pairs.max())
        lengths = sum(rows.shape[1] for rows, _ in cut.boundary.rounds)
        passed = {"halo": lengths, "all_to_all": (p - 1) * longest}
        passed["allgather"] = passed[COLUMNS] = (p - 1) * block
        rows = {"halo": (lengths, lengths), "all_to_all": (p * longest,) * 2}
        rows["allgather"] = block, p * block
        rows[COLUMNS] = p * block, block
        forward, back = rows[scheme] if pairs.any() else (0, 0)
        return {
            "sent": [sum(perf.bytes_by_kind(each).values()) for each in programs],
            "rule": 4 * self.cfg.width * np.array([forward, forward + back]),
            "passed": passed[scheme] * p / self.every,
            "missed": pairs.sum() - cut.live.sum(),
            "distance": max(map(_distance, outputs, self.whole)),
            "cut": cut.edge_cut,
            "imbalance": cut.imbalance,
        }

    def _cut(self, cut: "graphs.PartitionedGraph") -> tuple[np.ndarray, ...]:
        own = self.x, self.slope
        degrees = cut.take(self.degrees, halo=True)
        return (*map(cut.take, own), degrees, cut.senders, cut.receivers)

    def _cut_columns(self, cut: "graphs.PartitionedGraph") -> tuple[np.ndarray, ...]:
        """Returns inputs and slopes by slices of columns, of all parts' rows."""
        every = (np.concatenate(cut.take(own)[:, :-1]) for own in (self.x, self.slope))
        return tuple(np.stack(np.split(each, self.parts, 1)) for each in every)

    def _in_columns(self, cut: "graphs.PartitionedGraph", slopes: bool) -> Any:
        import jax
        from jax.sharding import PartitionSpec

        whole = cut.graph_of_columns()

        def on_device(*given: Any) -> Any:
            x, slope = (each[0] for each in given)

            def layer(x: Any) -> Any:
                own = graphs.Columns(values=x, width=self.cfg.width, axis="data")
                return graphs.gcn(whole, own, self.params)

            y, back = jax.vjp(layer, x)
            return (y[None], back(slope)[0][None]) if slopes else y[None]

        own = PartitionSpec("data")
        return jax.shard_map(on_device, mesh=self.mesh, in_specs=own, out_specs=own)

    def _in_parts(self, cut: "graphs.PartitionedGraph", slopes: bool) -> Any:
        import jax
        from jax.sharding import PartitionSpec

        from hpcjax.collectives import gather_rows

        def on_device(*given: Any) -> Any:
            x, slope, degrees, senders, receivers = (each[0] for each in given)
            vertices = cut.vertices.shape[1]
            part = graphs.Graph(senders=senders, receivers=receivers, vertices=vertices)

            def layer(x: Any) -> Any:
                x = gather_rows(x, cut.boundary, "data")
                own = {"degrees": degrees, "targets": cut.rows}
                return graphs.gcn(part, x, self.params, **own)

            y, back = jax.vjp(layer, x)
            return (y[None], back(slope)[0][None]) if slopes else y[None]

        own = PartitionSpec("data")
        return jax.shard_map(on_device, mesh=self.mesh, in_specs=own, out_specs=own)

    @functools.cached_property
    def whole(self) -> Any:
        """Outputs and slopes of one device."""
        import jax

        layer = functools.partial(graphs.gcn, self.graph, params=self.params)
        y, back = jax.vjp(layer, self.x)
        return y, back(self.slope)[0]

    def of_the_compiler(self, told: bool) -> float:
        """Returns rows through links of the whole program, its rows being cut."""
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        from hpcjax import perf

        vertices = -(-self.graph.vertices // self.parts) * self.parts
        padded = graphs.pad_graph(self.graph, vertices, len(self.graph.senders))
        own = NamedSharding(self.mesh, PartitionSpec("data"))
        everywhere = NamedSharding(self.mesh, PartitionSpec())

        def layer(x: Any) -> Any:
            if told:
                x = jax.lax.with_sharding_constraint(x, everywhere)
            return graphs.gcn(padded, x, self.params)

        shape = jax.ShapeDtypeStruct((vertices, self.cfg.width), "float32")
        program = jax.jit(layer, in_shardings=own, out_shardings=own)
        compiled = program.lower(shape).compile()
        sent = sum(perf.ring_bytes_by_axis(compiled, self.mesh).values())
        return sent * self.parts / (4 * self.cfg.width * self.every)


def _join_columns(cut: "graphs.PartitionedGraph", slices: Any) -> np.ndarray:
    """Returns slices of columns of all parts' rows by vertices."""
    every = np.concatenate(slices, 1)
    rows = every.reshape(cut.parts, -1, every.shape[1])
    return cut.join(np.pad(rows, ((0, 0), (0, 1), (0, 0))))  # the last is nobody's


def _distance(ours: Any, theirs: Any) -> float:
    return float(np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs)))
