"""A labelled property graph as a data set: vertices, and one of their properties."""

import dataclasses
import logging
import pathlib
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from hpcjax.core import checks
from hpcjax.core.config import Config, Seed, Several, Size
from hpcjax.core.errors import ConfigError, DataMissing
from hpcjax.core.objective import Objective
from hpcjax.data import wordnet
from hpcjax.data.citations import vertex_dataset
from hpcjax.data.objectives import VERTICES
from hpcjax.data.source import Dataset

if TYPE_CHECKING:
    from hpcjax import graphs
    from hpcjax.graphs import lpg

log = logging.getLogger(__name__)
_FINCEN = pathlib.Path(__file__).parent / "files" / "fincen.csv.gz"
# Of the sources that are known, the keys to predict from, and their kinds. Those of
# fincen are the reference's: repository C-TC/LPG2vec, `util.py`.
_KINDS: dict[str, dict[str, str]] = {
    "fincen": {
        **dict.fromkeys(("begin_date", "end_date"), "binned"),
        **dict.fromkeys(("beneficiary_bank", "name", "originator_bank"), "text"),
    },
    "wordnet": {"gloss": "text", "words": "text"},
}
_RANDOM = 50  # features of a vertex that say nothing, as many as the paper's


class Target(NamedTuple):
    """What is predicted of vertices.

    Attributes:
      classes: int32 [vertices], of each; -1 for none.
      names: of the classes.
      present: bool [vertices], which have the property.
    """

    classes: np.ndarray
    names: tuple[str, ...]
    present: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class PropertyGraphConfig(Config):
    """A property graph, of whose vertices one property is predicted.

    Half of the vertices are trained on, a fifth is for validation and the rest for
    test. Edges are taken in both directions. A property of numbers is cut into `bins`
    of equally many values.

    Attributes:
      source: "fincen", bank transfers that were reported (Neo4j's example; installed
        with the project); "wordnet", sets of synonyms and their pointers, of which the
        target "lexicographer" has 45 classes (see `hpcjax data fetch wordnet`); or the
        path of a store: a file `.csv` or `.csv.gz`, or a database.
      target: the key of the property.
      label: of the vertices that are predicted; none for all.
      bins: classes of numbers.
      only_present: whether vertices without the property are left out, and are not a
        class of their own.
      information: what vertices tell: "random" numbers, as the paper's structure alone;
        "degrees" by type and direction of edges; "labels"; "properties", labels and
        these; "edges", these and the types and properties of edges.
      edge_to_vertex: whether features of edges are added up at the vertex that they
        reach, as features of its own; for layers that see none of edges.
      keys: of the properties; none for those of the reference, or all but the target
        and predictions, which have a `<key>_confidence` beside them.
      buckets: that words of text are hashed to.
      leaks: keys that tell the target, and are no features.
      shuffled: whether properties are shuffled among vertices of the same labels.
      transductive: whether ranges, bins and categories are those of all vertices.
      split_seed: of the parts, and of what is random in features.
      holdout: the part that is held out.
    """

    objective: ClassVar[Objective] = VERTICES
    smoke: ClassVar[dict[str, str]] = {"information": "degrees"}

    source: str = "fincen"
    target: str = "amount"
    label: str = ""
    bins: Several = 10
    only_present: bool = False
    information: Literal["random", "degrees", "labels", "properties", "edges"] = (
        "properties"
    )
    edge_to_vertex: bool = False
    keys: tuple[str, ...] = ()
    buckets: Size = 128
    leaks: tuple[str, ...] = ()
    shuffled: bool = False
    transductive: bool = False
    split_seed: Seed = 0
    holdout: Literal["validation", "test"] = "validation"

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "edge_to_vertex adds up the features of edges, of information=edges"
        good = not self.edge_to_vertex or self.information == "edges"
        checks.require(good, rule, information=self.information)

    def load(self, root: pathlib.Path | None = None) -> Dataset:
        """Returns the vertices; `root` has WordNet, and is not used for others.

        Raises:
          ConfigError: unknown keys or labels, or the target among the features.
          DataMissing: there is no such store.
          DataFormatError: a file of another form.

        Examples:
          >>> held = PropertyGraphConfig(information="labels").load()
          >>> len(held.train), len(held.validation), held.outputs
          (3762, 1504, 11)
          >>> held.graph.features.shape, len(held.graph.senders)
          ((7524, 3), 81670)
        """
        graph = self.read(root)
        target = self.classify(graph)
        parts = self.split(graph, target)
        encoded = self._encode(graph, parts[0])
        held_out = parts[2] if self.holdout == "test" else parts[1]
        return vertex_dataset(encoded, target.classes, parts[0], held_out)

    def read(self, root: pathlib.Path | None = None) -> "lpg.PropertyGraph":
        """Returns the whole graph; see `load`."""
        if self.source != "wordnet":
            return open_store(self.source).read()
        if root is None:
            raise ConfigError("source=wordnet is below a data root: got root=None")
        return wordnet.read_graph(root)

    def classify(self, graph: "lpg.PropertyGraph") -> Target:
        """Returns the classes of vertices.

        Raises:
          ConfigError: an unknown key, or a target without two classes.
        """
        return classify(
            graph.column(self.target), bins=self.bins, absent=not self.only_present
        )

    def split(
        self, graph: "lpg.PropertyGraph", target: Target
    ) -> tuple[np.ndarray, ...]:
        """Returns the vertices of training, validation and test, each in order."""
        chosen = target.classes >= 0
        if self.label:
            chosen &= graph.with_label(self.label)
        every = np.flatnonzero(chosen)
        drawn = self._generator(0).permutation(every)
        cuts = len(every) // 2, len(every) // 2 + len(every) // 5
        return tuple(np.sort(part) for part in np.split(drawn, cuts))

    def _generator(self, use: int) -> np.random.Generator:
        """Returns the numbers of one of several uses."""
        return np.random.Generator(np.random.Philox(key=[self.split_seed, use]))

    def _encode(self, graph: "lpg.PropertyGraph", train: np.ndarray) -> "graphs.Graph":
        """Returns the graph with edges in both directions, and features."""
        from hpcjax import graphs
        from hpcjax.graphs import lpg

        graph = self._shuffle(graph) if self.shuffled else graph
        encoded = lpg.fit(
            self.specify(graph), graph, train, transductive=self.transductive
        ).transform(graph)
        features: Any = encoded.features
        ends, count = graph.ends(), len(graph.vertices)
        if self.information == "random":
            features = self._generator(1).random((count, _RANDOM), np.float32)
        elif self.information == "degrees":
            features = count_edges(graph)
        senders, receivers = np.concatenate([ends, ends[::-1]], axis=1)
        given = {}
        if self.information == "edges":
            of_edges = encoded.edge_features
            empty = np.zeros_like(of_edges)
            # What comes along an edge and what comes against it differ.
            given["edge_features"] = np.block([[of_edges, empty], [empty, of_edges]])
        if self.edge_to_vertex:
            features = add_received(features, receivers, given.pop("edge_features"))
        return graphs.make_graph(senders, receivers, count, features=features, **given)

    def specify(self, graph: "lpg.PropertyGraph") -> "lpg.EncoderSpec":
        """Returns the features of labels, and of the keys that were chosen.

        Raises:
          ConfigError: unknown keys, or the target, its leaks or copies among those
            chosen.
        """
        from hpcjax.graphs import lpg

        known: Any = _KINDS.get(self.source, {})
        keys = self.keys or tuple(known) or None
        told = () if keys else (self.target, *self.leaks, *_find_predictions(graph))
        if self.information not in ("properties", "edges"):
            keys, told = (), ()
        kinds = {key: known[key] for key in keys or () if key in known}
        spec = lpg.infer(graph, keys=keys, exclude=told, kinds=kinds)
        spec.check_target(self.target, self.leaks)
        copies = [x.key for x in spec.keys if _are_equal(graph, x.key, self.target)]
        rule = "a copy of the target cannot be a feature: it is one of its leaks"
        checks.require(not copies, rule, keys=copies)
        own = [dataclasses.replace(each, buckets=self.buckets) for each in spec.keys]
        return dataclasses.replace(spec, keys=tuple(own))

    def _shuffle(self, graph: "lpg.PropertyGraph") -> "lpg.PropertyGraph":
        """Returns the graph with properties of other vertices of the same labels."""
        rng, vertices = self._generator(2), graph.vertices.reset_index(drop=True)
        drawn = np.arange(len(vertices))
        for _, rows in vertices.groupby("_labels", sort=True):
            own = rows.index.to_numpy()
            drawn[own] = rng.permutation(own)
        for key in graph.keys:
            vertices[key] = vertices[key].to_numpy()[drawn]
        return dataclasses.replace(graph, vertices=vertices)


def prediction_keys(key: str) -> tuple[str, str]:
    """Returns the keys that predictions are written under: classes, and how sure."""
    return key, f"{key}_confidence"


def _find_predictions(graph: "lpg.PropertyGraph") -> list[str]:
    """Returns the keys of predictions that a graph has, told in the log."""
    pairs = [prediction_keys(key) for key in graph.keys]
    found = [key for pair in pairs if pair[1] in graph.keys for key in pair]
    if found:
        log.info("%s are predictions, and no features", ", ".join(found))
    return found


def _are_equal(graph: "lpg.PropertyGraph", key: str, target: str) -> bool:
    """Whether all vertices have the same of two properties."""
    from hpcjax.graphs.lpg.spec import present

    one, other = (present(graph.vertices, each) for each in (key, target))
    return one.index.equals(other.index) and all(map(np.array_equal, one, other))


def open_store(source: str) -> "lpg.GraphStore":
    """Returns a store by its path, or "fincen".

    Raises:
      DataMissing: there is none.
    """
    from hpcjax.graphs import lpg

    path = _FINCEN if source == "fincen" else pathlib.Path(source)
    if not path.exists():
        raise DataMissing(f"there is no graph in {source}")
    if path.name.endswith((".csv", ".csv.gz")):
        return lpg.CsvStore(path)
    return lpg.LadybugStore(path)


def classify(values: Any, *, bins: int, absent: bool) -> Target:
    """Returns the classes of a property.

    Args:
      values: of vertices, a pandas series, missing where a vertex has none.
      bins: of numbers, with equally many values each; equal values are in one.
      absent: whether vertices without it are a further class, the last.

    Raises:
      ConfigError: fewer than two classes.

    Examples:
      >>> import pandas as pd
      >>> found = classify(pd.Series([3.0, None, 1.0, 2.0, 9.0]), bins=2, absent=True)
      >>> found.classes.tolist(), found.names[-1]
      ([1, 2, 0, 0, 1], 'absent')
    """
    import pandas as pd

    from hpcjax.graphs.lpg.spec import present, type_of

    there = present(values.to_frame("value").reset_index(drop=True), "value")
    if len(there) and type_of(there.iloc[0]) == "number":
        cut = pd.qcut(there.astype(float), bins, duplicates="drop")
    else:
        cut = pd.Series(pd.Categorical(there.astype(str)), index=there.index)
    names = [str(each) for each in cut.cat.categories]
    classes = np.full(len(values), -1, np.int32)
    classes[there.index] = cut.cat.codes
    if absent and (classes < 0).any():
        classes[classes < 0] = len(names)
        names.append("absent")
    checks.require(len(names) > 1, "a target needs two classes", names=names)
    present_rows = np.zeros(len(values), bool)
    present_rows[there.index] = True
    return Target(classes, tuple(names), present_rows)


def count_edges(graph: "lpg.PropertyGraph") -> np.ndarray:
    """Returns log(1 + edges) of each type out of and into vertices, float32."""
    types, numbers = np.unique(graph.edges["_type"], return_inverse=True)
    count, kinds = len(graph.vertices), len(types)
    counts = [
        np.bincount(rows * kinds + numbers, minlength=count * kinds)
        for rows in graph.ends()
    ]
    both = [each.reshape(count, kinds) for each in counts]
    return np.log1p(np.concatenate(both, axis=1)).astype(np.float32)


def add_received(
    features: "graphs.SparseRows", receivers: np.ndarray, of_edges: np.ndarray
) -> "graphs.SparseRows":
    """Returns features of vertices, and behind them the sums of those of edges.

    Args:
      features: of vertices.
      receivers: the vertex that each edge reaches, integers [edges].
      of_edges: features of edges, [edges, columns].
    """
    from scipy import sparse

    from hpcjax import graphs

    own: Any = sparse.csr_array(
        (features.values, features.columns, features.offsets), shape=features.shape
    )
    where = receivers, np.arange(len(receivers))
    reach: Any = sparse.csr_array(
        (np.ones(len(receivers), np.float32), where), (own.shape[0], len(receivers))
    )
    both: Any = sparse.hstack([own, reach @ sparse.csr_array(of_edges)], format="csr")
    both.sort_indices()
    return graphs.SparseRows(
        offsets=both.indptr.astype(np.int32),
        columns=both.indices.astype(np.int32),
        values=both.data.astype(np.float32),
        width=both.shape[1],
    )
