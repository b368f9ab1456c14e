"""Features of a hand-made graph of every kind, against plain loops over its rows."""

import dataclasses
import json
import math
import re
import subprocess
import sys
import zlib

import numpy as np
import pandas as pd
import pytest

from hpcjax import graphs
from hpcjax.core import ConfigError
from hpcjax.graphs import lpg

N = 30
KINDS = {
    "amount": "binned",
    "born": "temporal",
    "note": "text",
    "place": "point",
    "tags": "categorical",
}


def made(n=N, order=None):
    """People and towns, with values of all kinds, some missing."""
    rng = np.random.default_rng(0)
    number = np.arange(n)
    words = ("red fox", "Blue-Fox", "the Red house", "")
    vertices = pd.DataFrame(
        {
            "_id": number * 7 + 3,
            "_labels": [
                ("Person", "Rich") if i % 4 == 0 else ("Person",) for i in number
            ]
            if n < 20
            else [
                ("Town",)
                if i % 3 == 0
                else ("Person", "Rich")
                if i % 4 == 0
                else ("Person",)
                for i in number
            ],
            "active": pd.Series(
                [None if i % 5 == 0 else i % 2 == 0 for i in number], dtype=object
            ),
            "age": pd.Series(
                [
                    None if i % 4 == 1 else int(a)
                    for i, a in enumerate(rng.integers(1, 9, n))
                ],
                dtype=object,
            ),
            "amount": rng.integers(0, 12, n).astype(float),
            "born": pd.to_datetime(rng.integers(0, 2**30, n), unit="s", utc=True),
            "note": [words[i % 4] for i in number],
            "place": [
                {"latitude": float(a), "longitude": float(b)}
                for a, b in zip(
                    rng.uniform(-90, 90, n), rng.uniform(-180, 180, n), strict=True
                )
            ],
            "tags": pd.Series(
                [None if i % 7 == 0 else ["a", "b", "c"][: i % 4] for i in number],
                dtype=object,
            ),
            "wait": pd.to_timedelta(rng.integers(1, 99, n), unit="min"),
        }
    )
    ends = rng.integers(0, n, (2, 40))
    edges = pd.DataFrame(
        {
            "_start": vertices["_id"].to_numpy()[ends[0]],
            "_end": vertices["_id"].to_numpy()[ends[1]],
            "_type": np.array(["KNOWS", "LIVES"])[rng.integers(0, 2, 40)],
            "since": rng.integers(1990, 2020, 40),
        }
    )
    if order is not None:
        vertices = vertices.iloc[order]
    return lpg.PropertyGraph(vertices, edges)


TRAIN = np.arange(0, N, 2)


def encoder(graph=None, rows=TRAIN, **changes):
    graph = made() if graph is None else graph
    spec = lpg.infer(graph, kinds=KINDS)
    keys = tuple(dataclasses.replace(each, buckets=16, bins=3) for each in spec.keys)
    return lpg.fit(dataclasses.replace(spec, keys=keys, **changes), graph, rows)


def dense(encoded):
    return np.asarray(graphs.make_dense(encoded.features))


def scaled(x, train):
    low, high = min(train), max(train)
    return min(max((x - low) / (high - low), 0), 1)


def expected(graph, train):
    """Names and values of every column, one vertex and one value at a time."""
    rows = [dict(row) for _, row in graph.vertices.iterrows()]
    own = [rows[at] for at in train]
    columns = {
        f"label:{label}": [float(label in row["_labels"]) for row in rows]
        for label in ("Person", "Rich", "Town")
    }
    columns["active"] = [float(row["active"] or 0) for row in rows]
    ages = [row["age"] for row in own if row["age"] is not None]
    columns["age"] = [
        0.0 if row["age"] is None else scaled(row["age"], ages) for row in rows
    ]
    amounts = np.array([row["amount"] for row in own])
    edges = sorted({float(np.quantile(amounts, share)) for share in (1 / 3, 2 / 3)})
    ends = ["", *(f"{edge:g}" for edge in edges), ""]
    for at in range(len(edges) + 1):
        low = -math.inf if at == 0 else edges[at - 1]
        high = math.inf if at == len(edges) else edges[at]
        columns[f"amount:({ends[at]},{ends[at + 1]}]"] = [
            float(low < row["amount"] <= high) for row in rows
        ]
    times = [row["born"].timestamp() for row in own]
    columns["born"] = [scaled(row["born"].timestamp(), times) for row in rows]
    for cycle, of, period in (
        ("month", lambda t: t.month - 1, 12),
        ("weekday", lambda t: t.weekday(), 7),
        ("hour", lambda t: t.hour, 24),
    ):
        for name, f in (("sin", math.sin), ("cos", math.cos)):
            columns[f"born:{cycle}:{name}"] = [
                f(2 * math.pi * of(row["born"]) / period) for row in rows
            ]
    hashed = np.zeros((len(rows), 16))
    for at, row in enumerate(rows):
        for word in re.findall(r"\w+", row["note"].lower()):
            marked = f"<{word}>"
            for token in (word, *(marked[i : i + 3] for i in range(len(marked) - 2))):
                hashed[at, zlib.crc32(token.encode()) % 16] += 1
        hashed[at] /= max(np.linalg.norm(hashed[at]), 1e-9)
    columns |= {f"note#{at}": hashed[:, at].tolist() for at in range(16)}
    for axis in "xyz":
        columns[f"place:{axis}"] = [on_sphere(row["place"], axis) for row in rows]
    known = sorted(
        {tag for row in own if row["tags"] is not None for tag in row["tags"]}
    )
    for tag in known:
        columns[f"tags={tag}"] = [
            float(row["tags"] is not None and tag in row["tags"]) for row in rows
        ]
    waits = [row["wait"].total_seconds() for row in own]
    columns["wait"] = [scaled(row["wait"].total_seconds(), waits) for row in rows]
    return columns


def on_sphere(place, axis):
    theta, phi = math.radians(place["latitude"]), math.radians(place["longitude"])
    found = {
        "x": math.cos(theta) * math.cos(phi),
        "y": math.cos(theta) * math.sin(phi),
        "z": math.sin(theta),
    }
    return found[axis]


@pytest.mark.acceptance("lpg2vec", 1)
def test_features_are_those_of_plain_loops():
    graph = made()
    fitted = encoder(graph)
    encoded = fitted.transform(graph)
    wanted = expected(graph, TRAIN)
    assert list(encoded.names) == list(wanted)
    np.testing.assert_allclose(
        dense(encoded), np.array(list(wanted.values())).T, atol=1e-6
    )
    assert encoded.edge_names == ("type:KNOWS", "type:LIVES", "since")
    types = graph.edges["_type"].to_numpy()
    np.testing.assert_array_equal(encoded.edge_features[:, 0], types == "KNOWS")
    assert (encoded.edge_features[:, 2] <= 1).all()
    assert encoded.names[encoded.slices["tags"]][0] == "tags=a"
    again = lpg.FittedEncoder.from_json(fitted.to_json())
    np.testing.assert_array_equal(dense(again.transform(graph)), dense(encoded))
    assert again.transform(graph).names == encoded.names


@pytest.mark.acceptance("lpg2vec", 2, 10)
def test_columns_do_not_depend_on_the_order_of_rows():
    order = np.random.default_rng(1).permutation(N)
    there = {row: at for at, row in enumerate(order)}
    moved = made(order=order)
    again = encoder(moved, rows=[there[row] for row in TRAIN]).transform(moved)
    straight = encoder().transform(made())
    assert again.names == straight.names
    np.testing.assert_array_equal(dense(again), dense(straight)[order])


@pytest.mark.slow
@pytest.mark.acceptance("lpg2vec", 2)
def test_columns_do_not_depend_on_the_hash_of_strings():
    code = "from tests.graphs.lpg.test_encoders import *; print(encoder().to_json())"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


@pytest.mark.acceptance("lpg2vec", 3)
def test_the_first_layer_needs_no_dense_features():
    encoded = encoder().transform(made())
    kernel = np.random.default_rng(0).normal(size=(len(encoded.names), 5))
    found = graphs.project(encoded.features, kernel.astype(np.float32))
    np.testing.assert_allclose(found, dense(encoded) @ kernel, atol=1e-5)


@pytest.mark.acceptance("lpg2vec", 9)
def test_what_is_fitted_sees_training_rows_alone():
    graph = made()
    changed = graph.vertices.copy()
    rest = np.setdiff1d(np.arange(N), TRAIN)
    changed.loc[rest, "amount"] += 1000.0
    changed.loc[rest, "wait"] *= 9
    for row in rest:
        changed.at[row, "tags"] = ["zebra"]
    edges = graph.edges.copy()
    inside = [edges[end].isin(changed.loc[TRAIN, "_id"]) for end in ("_start", "_end")]
    assert (inside[0] ^ inside[1]).any()
    edges.loc[~(inside[0] & inside[1]), "since"] = 3000
    other = lpg.PropertyGraph(changed, edges)
    assert encoder(other).stats == encoder(graph).stats
    assert encoder(other).edge_stats == encoder(graph).edge_stats
    every = lpg.fit(encoder(graph).spec, other, TRAIN, transductive=True)
    assert every.transductive
    assert "zebra" in every.stats["tags"]["values"]
    assert encoder(graph).transform(other).unseen == {"tags": len(rest)}


def of_values(values, kind=None, train=None, **options):
    """The features of one key."""
    count = len(values)
    vertices = pd.DataFrame(
        {
            "_id": range(count),
            "_labels": [()] * count,
            "k": pd.Series(values, dtype=object),
        }
    )
    edges = pd.DataFrame({"_start": [], "_end": [], "_type": []})
    graph = lpg.PropertyGraph(vertices, edges)
    spec = lpg.infer(graph, kinds={"k": kind} if kind else {})
    if options:
        own = dataclasses.replace(spec.keys[0], **options)
        spec = dataclasses.replace(spec, keys=(own,))
    fitted = lpg.fit(spec, graph, np.arange(count) if train is None else train)
    return dense(fitted.transform(graph)), fitted


@pytest.mark.acceptance("lpg2vec", 10)
@pytest.mark.parametrize(
    ("values", "kind", "wanted"),
    [
        ([5.0, 5.0, None], "numeric", [[0], [0], [0]]),
        ([1, 3, 2, None], "numeric", [[0], [1], [0.5], [0]]),
        ([2.5, float("nan")], "numeric", [[0], [0]]),
        ([7.0, 7.0], "binned", [[1], [1]]),
        ([7.0, 8.0], "binned", [[1, 0], [0, 1]]),
        ([7.0, 9.0, 8.0], "binned", [[1, 0, 0], [0, 0, 1], [0, 1, 0]]),
        ([1.0, 2.0, 3.0, 4.0], "binned", [[1, 0], [1, 0], [0, 1], [0, 1]]),
        ([1.0, 1.0, 1.0, 2.0, 3.0, 4.0], "binned", [[1, 0]] * 3 + [[0, 1]] * 3),
        ([["a"], [], None], "categorical", [[1], [0], [0]]),
        ([[1, 2], [1, 3]], None, [[1, 1, 0], [1, 0, 1]]),
        ([[1, 8.0], [3, 8], [2, 8], None], None, [[0, 0], [1, 0], [0.5, 0], [0, 0]]),
        ([[1, 4], [3, 2]], "vector", [[0, 1], [1, 0]]),
        ([True, False, None], None, [[1], [0], [0]]),
        ([{"latitude": 0, "longitude": 180}] * 2, None, [[-1, 0, 0]] * 2),
        ([{"latitude": 0, "longitude": -180}] * 2, None, [[-1, 0, 0]] * 2),
    ],
)
def test_corners(values, kind, wanted):
    found, _ = of_values(values, kind)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.acceptance("lpg2vec", 10)
def test_an_empty_list_is_there_and_a_missing_one_is_not():
    found, _ = of_values([["a"], [], None], "categorical", missing=True)
    assert found.tolist() == [[1, 1], [0, 1], [0, 0]]


@pytest.mark.acceptance("lpg2vec", 10)
def test_values_out_of_the_training_rows_are_clipped_or_unseen():
    found, _ = of_values([0.0, 10.0, -5.0, 20.0], "numeric", train=[0, 1])
    assert found[:, 0].tolist() == [0, 1, 0, 1]
    # 2 is the edge of the first bin, which is closed at its right.
    found, fitted = of_values(
        [1.0, 2.0, 3.0, 4.0, -9.0, 2.5, 9.0], "binned", [0, 1, 2, 3]
    )
    assert fitted.stats["k"]["edges"] == [2.5]
    assert found.argmax(1).tolist() == [0, 0, 1, 1, 0, 0, 1]
    found, _ = of_values([[0.0, 1], [1, 3], [0.5, 9]], train=[0, 1])
    assert found.tolist() == [[0, 0], [1, 1], [0.5, 1]]
    found, _ = of_values([None, [1.0, 3]], "vector", train=[0])
    assert found.shape == (2, 0)
    found, _ = of_values(["x", "y", "z"], "categorical", train=[0, 1])
    assert found.tolist() == [[1, 0], [0, 1], [0, 0]]


POINT = r"k must be points .*: got {'latitude': .* \(of 1\); .* leave the key out"


@pytest.mark.acceptance("lpg2vec", 10)
@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([1.0, float("inf")], {}, r"k must be finite: .* \(of 1\)"),
        ([1, "one"], {}, r"several types: number \(of 0\), string \(of 1\)"),
        (
            [{"latitude": 9, "longitude": 0}, {"latitude": -91, "longitude": 0}],
            {},
            POINT,
        ),
        ([{"latitude": 9, "longitude": 0}, {"latitude": 9}], {}, POINT),
        ([{"latitude": 9, "longitude": 0}, {"latitude": None}], {}, POINT),
        ([{"latitude": math.nan, "longitude": 0}], {}, r"k must .*nan.* \(of 0\)"),
        ([{"latitude": 0, "longitude": math.inf}], {}, r"k must .*inf.* \(of 0\)"),
        (["soon"], {"kind": "temporal"}, "k cannot be temporal: "),
        (["many"], {"kind": "binned"}, "k cannot be binned: .*'many'"),
        (["a b", "b", "b"], {"categories": 1}, "at most 1 values: got 2"),
        ([[1.0, 2], [0, 1, 2]], {}, r"lists of 2 finite .*: got \[0, 1, 2\] \(of 1"),
        ([[1.0, float("nan")]], {}, r"lists of 2 finite .*: got \[1.0, nan\] \(of 0"),
    ],
)
def test_values_that_are_no_features_are_refused(values, options, message):
    with pytest.raises(ConfigError, match=message):
        of_values(values, **options)


def test_a_vector_of_another_graph_has_the_length_of_training():
    _, fitted = of_values([[1.0, 2.0], [0.0, 1.0]])
    vertices = pd.DataFrame({"_id": ["v"], "_labels": [()], "k": [[1.0, 2.0, 3.0]]})
    edges = pd.DataFrame({"_start": [], "_end": [], "_type": []})
    with pytest.raises(ConfigError, match=r"lists of 2 .*\(of v\)"):
        fitted.transform(lpg.PropertyGraph(vertices, edges))
    again = lpg.FittedEncoder.from_json(fitted.to_json())
    assert again == fitted


def test_the_words_of_a_list_are_those_of_its_texts():
    lists, _ = of_values([["Red\nfox", "hen"], []], "text")
    texts, _ = of_values(["red FOX hen", ""], "text")
    np.testing.assert_array_equal(lists, texts)
    assert not lists[1].any()


def test_keys_that_name_their_vertex_are_left_out():
    graph = made()
    vertices = graph.vertices.assign(
        code=[f"c{i}" for i in range(N)], serial=list(range(N)), title=["a b"] * N
    )
    spec = lpg.infer(lpg.PropertyGraph(vertices, graph.edges), exclude=("age",))
    assert spec.left_out == ("code", "serial")
    kinds = {each.key: each.kind for each in spec.keys}
    assert kinds["title"] == "categorical"
    assert "age" not in kinds
    assert lpg.EncoderSpec.from_json(spec.to_json()) == spec


def test_unknown_keys_and_other_versions_are_refused():
    with pytest.raises(ConfigError, match="no key 'amuont'; did you mean 'amount'"):
        lpg.infer(made(), keys=("amuont",))
    with pytest.raises(ConfigError, match="tells the target 'age' cannot be a feature"):
        lpg.infer(made()).check_target("age")
    given = json.loads(lpg.infer(made()).to_json()) | {"version": 9}
    with pytest.raises(ConfigError, match="of version 1: got version=9"):
        lpg.EncoderSpec.from_json(json.dumps(given))
    without = lpg.PropertyGraph(made().vertices.drop(columns="age"), made().edges)
    with pytest.raises(ConfigError, match="no key 'age'"):
        encoder().transform(without)
