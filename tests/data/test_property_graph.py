"""A property graph as a data set: its counts, its classes, and what vertices tell."""

import dataclasses
import pathlib

import numpy as np
import pandas as pd
import pytest

from hpcjax import data, graphs
from hpcjax.core import ConfigError, DataMissing
from hpcjax.data import property_graph
from hpcjax.data.property_graph import PropertyGraphConfig
from hpcjax.graphs import lpg


@pytest.fixture(scope="module")
def fincen():
    return property_graph.open_store("fincen").read()


@pytest.mark.acceptance("lpg2vec", 7)
def test_fincen_has_what_the_reference_counts(fincen):
    labels = fincen.vertices["_labels"].value_counts().to_dict()
    assert labels == {("Filing",): 4507, ("Entity",): 2763, ("Country",): 254}
    types = fincen.edges["_type"].value_counts().to_dict()
    assert types == {
        "CONCERNS": 24491,
        **dict.fromkeys(("FILED", "BENEFITS", "ORIGINATOR"), 4507),
        "COUNTRY": 2823,
    }
    target = PropertyGraphConfig().classify(fincen)
    counts = np.bincount(target.classes)
    assert counts[-1] == 3017
    assert (np.abs(counts[:-1] - 450) < 60).all()


def test_parts_are_of_all_vertices_and_of_none_twice(fincen):
    config = PropertyGraphConfig()
    parts = config.split(fincen, config.classify(fincen))
    assert [len(part) for part in parts] == [3762, 1504, 2258]
    assert len(np.unique(np.concatenate(parts))) == 7524
    only = PropertyGraphConfig(only_present=True, label="Filing")
    parts = only.split(fincen, only.classify(fincen))
    assert sum(map(len, parts)) == 4507
    assert only.classify(fincen).classes.max() == 9


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A small graph in a file."""
    n = 40
    rng = np.random.default_rng(0)
    vertices = pd.DataFrame(
        {
            "_id": np.arange(n),
            "_labels": [("A",) if i % 2 else ("B",) for i in range(n)],
            "size": rng.permutation(n) * 1.0,
            "twin": rng.permutation(n) * 2.0,
            "colour": np.array(["red", "green"])[rng.integers(0, 2, n)],
        }
    )
    ends = rng.integers(0, n, (2, 60))
    types = np.array(["X", "Y"])[rng.integers(0, 2, 60)]
    edges = pd.DataFrame({"_start": ends[0], "_end": ends[1], "_type": types})
    path = tmp_path_factory.mktemp("graphs") / "small.csv"
    lpg.CsvStore(path).save(lpg.PropertyGraph(vertices, edges))
    return path


def load(store: pathlib.Path, **fields):
    return PropertyGraphConfig(
        **{"source": str(store), "target": "size", "bins": 4, **fields}
    ).load()


@pytest.mark.parametrize(
    ("information", "columns"),
    [("random", 50), ("degrees", 4), ("labels", 2), ("properties", 5), ("edges", 5)],
)
def test_what_vertices_tell(store, information, columns):
    held = load(store, information=information)
    graph = held.graph
    assert graph.features.shape == (40, columns)
    assert len(graph.senders) == 120
    assert (graph.edge_features is None) == (information != "edges")
    if information == "edges":
        # Each edge has its type in the half of its direction.
        assert graph.edge_features.shape == (120, 4)
        assert graph.edge_features.sum(0)[:2].sum() == 60
        assert (graph.edge_features.sum(1) == 1).all()
    if information == "degrees":
        counts = np.expm1(graph.features).sum(1)
        every = np.bincount(graph.senders, minlength=40)
        np.testing.assert_allclose(counts, every, rtol=1e-5)


def test_features_of_edges_are_added_up_at_the_vertices_they_reach(store):
    with_edges = load(store, information="edges").graph
    held = load(store, information="edges", edge_to_vertex=True).graph
    assert held.edge_features is None
    found = np.asarray(graphs.make_dense(held.features))
    own = np.asarray(graphs.make_dense(with_edges.features))
    np.testing.assert_array_equal(found[:, : own.shape[1]], own)
    wanted = np.zeros((40, with_edges.edge_features.shape[1]))
    for receiver, each in zip(
        with_edges.receivers, with_edges.edge_features, strict=True
    ):
        wanted[receiver] += each
    np.testing.assert_allclose(found[:, own.shape[1] :], wanted, rtol=1e-6)
    assert wanted.sum() == 120
    with pytest.raises(ConfigError, match=r"adds up .*: got information='labels'"):
        PropertyGraphConfig(information="labels", edge_to_vertex=True)


def test_shuffled_properties_stay_with_their_label(store):
    before = lpg.CsvStore(store).read()
    config = PropertyGraphConfig(source=str(store), target="size", shuffled=True)
    after = config._shuffle(before)
    assert (after.vertices["size"] != before.vertices["size"]).mean() > 0.8
    for label in ("A", "B"):
        own = before.with_label(label)
        for key in ("size", "colour"):
            one, other = (sorted(each.vertices[key][own]) for each in (before, after))
            assert one == other
    pairs = [
        set(zip(each.vertices["size"], each.vertices["colour"], strict=True))
        for each in (before, after)
    ]
    assert pairs[0] == pairs[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target": "sise"}, "no vertex has the key 'sise'; did you mean 'size'"),
        (
            {"keys": ("size", "twin")},
            "target 'size' cannot be a feature: got keys=..siz",
        ),
        (
            {"keys": ("twin",), "leaks": ("twin",)},
            "cannot be a feature: got keys=..twin",
        ),
        ({"label": "C"}, "no vertex has the label 'C'"),
        ({"keys": ("colours",)}, "did you mean 'colour'"),
    ],
)
def test_what_cannot_be_predicted_is_refused(store, fields, message):
    with pytest.raises(ConfigError, match=message):
        load(store, **fields)


def test_leaks_are_no_features_and_a_missing_store_is_named(store):
    held = load(store, leaks=("twin",))
    assert held.graph.features.shape == (40, 4)
    with pytest.raises(DataMissing, match=r"no graph in nowhere\.csv"):
        PropertyGraphConfig(source="nowhere.csv").load()
    with pytest.raises(ConfigError, match="a target needs two classes"):
        property_graph.classify(pd.Series(["a", "a"]), bins=2, absent=True)
    assert data.PropertyGraphConfig is PropertyGraphConfig


def test_predictions_and_copies_of_the_target_are_no_features(store, tmp_path, caplog):
    graph = lpg.CsvStore(store).read()
    own = graph.vertices
    told = own.assign(guess=own["size"], guess_confidence=0.5, sure_confidence=0.5)
    config = PropertyGraphConfig(source="x.csv", target="size")
    with caplog.at_level("INFO", "hpcjax"):
        spec = config.specify(lpg.PropertyGraph(told, graph.edges))
    assert [each.key for each in spec.keys] == ["colour", "sure_confidence", "twin"]
    assert "guess, guess_confidence are predictions" in caplog.text
    sizes = [*own["size"][:-1], None]
    near, copy = (own.assign(size=sizes, area=each) for each in (own["size"], sizes))
    spec = config.specify(lpg.PropertyGraph(near, graph.edges))
    assert [each.key for each in spec.keys] == ["area", "colour", "twin"]
    for chosen in ((), ("area", "twin")):
        copied = dataclasses.replace(config, keys=chosen)
        with pytest.raises(ConfigError, match=r"copy of the target .*keys=\['area'\]"):
            copied.specify(lpg.PropertyGraph(copy, graph.edges))


@pytest.mark.slow
@pytest.mark.acceptance("lpg2vec", 4, 5)
def test_a_database_gives_the_features_of_the_file_and_keeps_predictions(
    fincen, tmp_path
):
    database = lpg.LadybugStore(tmp_path / "fincen.lbdb")
    lpg.copy(property_graph.open_store("fincen"), database)
    spec = lpg.infer(fincen, exclude=("location",))
    wanted = lpg.fit(spec, fincen, np.arange(7524), transductive=True).transform(fincen)
    guesses = np.random.default_rng(0).integers(0, 11, 4507)
    ids = fincen.vertices["_id"][fincen.with_label("Filing")].to_numpy()
    database.write("Filing", "guess", ids, guesses)
    read = database.read()
    kept = read.vertices.set_index("_id")["guess"]
    np.testing.assert_array_equal(kept.loc[ids].astype(int), guesses)
    assert kept.notna().sum() == 4507
    # In the order of the file.
    read = lpg.PropertyGraph(
        read.vertices.set_index("_id").loc[fincen.vertices["_id"]].reset_index(),
        read.edges,
    )
    found = lpg.fit(spec, read, np.arange(7524), transductive=True).transform(read)
    assert found.names == wanted.names
    for name in ("offsets", "columns"):
        one, other = (getattr(each.features, name) for each in (found, wanted))
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(found.features.values, wanted.features.values, atol=1e-6)
    edges = [
        sorted(zip(*graph.ends(), graph.edges["_type"], strict=True))
        for graph in (read, fincen)
    ]
    assert edges[0] == edges[1]
