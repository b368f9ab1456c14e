"""Stores of property graphs keep what they are given, and copy to one another."""

import datetime
import gzip
import shutil
import sys

import numpy as np
import pandas as pd
import pytest

from hpcjax.core import ConfigError
from hpcjax.core.errors import DataFormatError, DataMissing
from hpcjax.graphs import lpg

UTC = datetime.UTC
SOME = datetime.datetime(2020, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
OLD = datetime.datetime(1900, 1, 1, tzinfo=UTC)
HERE = {"crs": "wgs-84", "latitude": 47.25, "longitude": -8.5, "height": None}
THERE = {"crs": "wgs-84", "latitude": -33.0, "longitude": 151.2, "height": None}
MONTH = datetime.timedelta(days=30.4375)
LONG = datetime.timedelta(days=3, seconds=5, microseconds=7)


def objects(values):
    return pd.Series(values, dtype=object)


def hand_made(ids=range(100, 112)):
    """Returns twelve vertices with every kind of value, and ten edges."""
    n = None
    vertices = pd.DataFrame(
        {
            "_id": objects(list(ids)),
            "_labels": objects(
                [
                    *[("Country",)] * 2,
                    *[("Entity",)] * 3,
                    *[("Bank", "Entity")] * 3,
                    *[("Filing",)] * 2,
                    ("Bank",),
                    (),
                ]
            ),
            "name": objects(
                ["Ça", 'a "quote", `tick`', n, "x\ny", " \\ 'z' ", *"pqrs", n, n, "t"]
            ),
            "count": objects([n, n, 1, -2, 2**62, 0, n, 7, n, n, n, n]),
            "amount": objects([n, n, n, 0.1, 5.69e7, n, -1e-300, n, 1.0, n, n, n]),
            "match": objects([n, n, True, False, n, True, *[n] * 6]),
            "tags": objects([["a"], [], n, ["b", "c;d"], *[n] * 7, ["e", "f"]]),
            "begin": objects([*[n] * 8, SOME, OLD, n, n]),
            "lasts": objects([*[n] * 8, LONG, datetime.timedelta(days=-400), n, n]),
            "from": objects([HERE, THERE, *[n] * 10]),
        }
    )
    given = list(ids)
    at = [(0, 1), (2, 0), (3, 0), (5, 1), (11, 0), (8, 2), (8, 5), (9, 10), (8, 2)]
    edges = pd.DataFrame(
        {
            "_start": objects([given[one] for one, _ in at]),
            "_end": objects([given[other] for _, other in at]),
            "_type": objects(["COUNTRY"] * 5 + ["CONCERNS"] * 4),
            "weight": objects([0.5, n, 1.5, n, n, n, n, n, 2.0]),
            "number": objects([n, n, n, n, n, 1, 2, 3, 4]),
            "to": objects(["u", n, n, n, "v", n, n, n, n]),
            "since": objects([n, n, n, n, n, SOME, OLD, n, n]),
        }
    )
    return lpg.PropertyGraph(vertices, edges)


def plain(graph):
    """Returns vertices and edges as dictionaries of what each has, in one order."""
    return [
        sorted(
            (
                {
                    key: value
                    for key, value in row.items()
                    if isinstance(value, list | tuple | dict) or not pd.isna(value)
                }
                for row in table.to_dict("records")
            ),
            key=lambda row: str([row.get(name) for name in (*order, "number")]),
        )
        for table, order in (
            (graph.vertices, ["_id"]),
            (graph.edges, ["_type", "_start", "_end"]),
        )
    ]


def database(path):
    # Room for as much as a machine has takes longer to set up than to use.
    return lpg.LadybugStore(path, memory=1 << 27)


def stores(root):
    return {
        "csv": lpg.CsvStore(root / "graph.csv"),
        "gz": lpg.CsvStore(root / "graph.csv.gz"),
        "ladybug": database(root / "graph.db"),
    }


@pytest.fixture(params=["csv", "ladybug"])
def store(request, tmp_path):
    return stores(tmp_path)[request.param]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the graph in each store; saving takes most of the time."""
    root = tmp_path_factory.mktemp("saved")
    for each in stores(root).values():
        each.save(hand_made())
    return root


@pytest.fixture
def filled(store, saved):
    shutil.copy(saved / store.path.name, store.path)
    return store


@pytest.fixture
def ladybug(saved, tmp_path):
    shutil.copy(saved / "graph.db", tmp_path)
    return stores(tmp_path)["ladybug"]


def run(path, *statements):
    import ladybug

    with ladybug.Database(path) as opened, ladybug.Connection(opened) as link:
        for statement in statements:
            link.execute(statement)


def values(graph, key):
    return dict(zip(graph.vertices["_id"], graph.column(key), strict=True))


def test_what_is_read_is_what_was_saved(filled):
    assert plain(filled.read()) == plain(hand_made())


def test_integers_stay_integers_beside_missing_values(filled):
    found = filled.read().vertices["count"].dropna()
    assert {type(value) for value in found} == {int}


def test_plain_columns_of_integers_are_kept(store):
    """Beside each other, vertices have no `_start`, and edges no `_id`."""
    ids = np.array([5, 2**60 + 1])
    vertices = pd.DataFrame({"_id": ids, "_labels": [("A",)] * 2, "count": 2**60 + ids})
    vertices["lists"] = [np.array([1, 2]), [np.int64(3), np.float64(0.5)]]
    vertices["lasts"] = pd.to_timedelta([1, 90], unit="min")
    edges = pd.DataFrame({"_start": ids[:1], "_end": ids[1:], "_type": "R", "n": [3]})
    store.save(lpg.PropertyGraph(vertices, edges))
    store.write("A", "new", ids, [1, 2])
    found = store.read()
    assert values(found, "new") == {5: 1, 2**60 + 1: 2}
    assert [int(each) for each in found.column("count")] == [5 + 2**60, 2**61 + 1]
    assert [list(each) for each in found.column("lists")] == [[1, 2], [3, 0.5]]
    assert list(found.column("lasts")) == [
        datetime.timedelta(minutes=n) for n in (1, 90)
    ]
    assert found.edges.to_dict("records") == [
        {"_start": 5, "_end": 2**60 + 1, "_type": "R", "n": 3}
    ]
    assert {type(each) for each in found.vertices["_id"]} == {int}


def test_ids_that_could_be_others_are_refused():
    vertices = pd.DataFrame({"_id": [2**60, 2**60 + 1], "_labels": [("A",)] * 2})
    edges = pd.DataFrame({"_start": [2.0**60], "_end": [2**60], "_type": ["R"]})
    with pytest.raises(ConfigError, match=r"cannot be floats.*column='_start'"):
        lpg.PropertyGraph(vertices, edges)
    edges = edges.assign(_start=[None])
    with pytest.raises(ConfigError, match=r"missing: got column='_start', rows=\[0\]"):
        lpg.PropertyGraph(vertices, edges)
    good = lpg.PropertyGraph(vertices, edges.assign(_start=np.uint64([2**60 + 1])))
    assert [int(each[0]) for each in good.ends()] == [1, 0]


def test_missing_values_are_none(filled):
    found = filled.read()
    missing = [
        value
        for table in (found.vertices, found.edges)
        for key in table.columns
        for value in table[key]
        if not isinstance(value, list | tuple | dict) and pd.isna(value)
    ]
    assert set(missing) == {None}


def test_ids_may_be_strings(store):
    graph = hand_made([f"4:{at}" for at in range(12)])
    store.save(graph)
    assert plain(store.read()) == plain(graph)


def test_ids_that_look_like_other_things_are_strings(store):
    ids = ["2020-01-01", "[1]", "true", "1.5", "007", *"abcdefg"]
    store.save(hand_made(ids))
    assert sorted(store.read().vertices["_id"]) == sorted(ids)


def test_a_schema_names_the_keys_that_some_have(filled):
    found = filled.schema()
    assert found == lpg.schema_of(hand_made())


@pytest.mark.parametrize(
    ("source", "target"), [("csv", "ladybug"), ("ladybug", "csv"), ("gz", "ladybug")]
)
def test_copies_are_the_same(source, target, saved, tmp_path):
    copied = stores(tmp_path)[target]
    lpg.copy(stores(saved)[source], copied)
    assert plain(copied.read()) == plain(hand_made())


def test_a_graph_without_edges_or_properties_is_kept(store):
    vertices = pd.DataFrame({"_id": objects([1, 2]), "_labels": objects([("A",), ()])})
    edges = pd.DataFrame({"_start": [], "_end": [], "_type": []}, dtype=object)
    store.save(lpg.PropertyGraph(vertices, edges))
    assert plain(store.read())[1] == []


KINDS = {
    "integers": [1, 2],
    "numbers": [0.25, -3.5],
    "texts": ["one", "two"],
    "booleans": [True, False],
    "lists": [["a", "b"], []],
    "times": [SOME, OLD],
    "spans": [LONG, LONG],
    "new points": [HERE, THERE],
}


def test_new_keys_of_all_kinds_are_written(filled):
    for key, given in KINDS.items():
        # In two tables of the database there are vertices with this label.
        filled.write("Bank", key, [110, 105], given)
    read = filled.read()
    found = {key: values(read, key) for key in KINDS}
    assert {key: [each[110], each[105]] for key, each in found.items()} == KINDS


def test_writing_leaves_the_rest(filled):
    filled.write("Bank", "new", [110], [1])
    wanted = hand_made()
    new = objects([*[None] * 10, 1, None])
    wanted = lpg.PropertyGraph(wanted.vertices.assign(new=new), wanted.edges)
    assert plain(filled.read()) == plain(wanted)


def test_a_key_that_is_there_is_written_for_the_ids_given(filled):
    before = values(filled.read(), "count")
    filled.write("Entity", "count", np.array([102, 107]), np.array([11, 12]))
    assert values(filled.read(), "count") == {**before, 102: 11, 107: 12}


def test_numbers_may_be_written_where_other_numbers_are(filled):
    filled.write("Filing", "amount", [109], [3])
    assert values(filled.read(), "amount")[109] == 3


def test_none_takes_values_away(filled):
    filled.write("Filing", "begin", [108], [None])
    assert values(filled.read(), "begin")[108] is None


def test_none_for_a_new_key_changes_nothing(filled):
    filled.write("Filing", "new", [108], [None])
    assert plain(filled.read()) == plain(hand_made())


def test_labels_that_no_vertex_has_are_told(filled):
    with pytest.raises(ConfigError, match="'Enttiy'; did you mean 'Entity'"):
        filled.write("Enttiy", "x", [102], [1])


def test_ids_of_no_vertices_of_the_label_are_told(filled):
    with pytest.raises(ConfigError, match=r"2 ids are no Entity: got \[100, 7\]"):
        filled.write("Entity", "x", [102, 100, 7], [1, 2, 3])


def test_nothing_is_written_if_some_ids_are_wrong(filled):
    with pytest.raises(ConfigError, match="1 ids are no Entity"):
        filled.write("Entity", "x", [102, 7], [1, 2])
    assert plain(filled.read()) == plain(hand_made())


@pytest.mark.parametrize(
    ("key", "ids", "given", "error"),
    [
        ("x", [102], [1, 2], "ids=1, values=2"),
        ("x", [102, 102], [1, 2], r"one value: got twice=\[102\]"),
        ("_id", [102], [1], "got key='_id'"),
    ],
)
def test_what_cannot_be_written_is_told(key, ids, given, error, filled):
    with pytest.raises(ConfigError, match=error):
        filled.write("Entity", key, ids, given)


def test_a_graph_is_saved_once(filled):
    with pytest.raises(ConfigError, match="a graph is saved in"):
        filled.save(hand_made())


def test_a_store_that_is_not_there_is_told(store):
    with pytest.raises(FileNotFoundError, match="graph"):
        store.read()


class TestCsv:
    def test_a_label_that_would_be_read_as_two_is_refused(self, tmp_path):
        vertices = pd.DataFrame({"_id": [1], "_labels": [("A:B",)]})
        edges = pd.DataFrame(columns=["_start", "_end", "_type"], dtype=object)
        with pytest.raises(ConfigError, match=r"cannot have a colon: .*'A:B'"):
            lpg.CsvStore(tmp_path / "a.csv").save(lpg.PropertyGraph(vertices, edges))

    HEAD = "_id,_labels,k,_start,_end,_type\n"

    def read(self, root, *texts):
        rows = [f'{at},:A,"{text}",,,' for at, text in enumerate(texts)]
        path = root / "graph.csv"
        path.write_text(self.HEAD + "\n".join(rows) + "\n", encoding="utf-8")
        return list(lpg.CsvStore(path).read().column("k"))

    @pytest.mark.parametrize(
        ("texts", "wanted"),
        [
            (["1", "", "-20"], [1, None, -20]),
            (["007", "1"], ["007", "1"]),
            (["5.69E+07", "1", ".5"], [5.69e7, 1.0, 0.5]),
            (["Infinity", "-Infinity"], [float("inf"), float("-inf")]),
            (["true", "", "false"], [True, None, False]),
            (["true", "1"], ["true", "1"]),
            (["1_000"], ["1_000"]),
            ([str(2**63 - 1), str(-(2**63))], [2**63 - 1, -(2**63)]),
            ([str(2**63)], [2.0**63]),
            (["[]", '[""a"",""b""]'], [[], ["a", "b"]]),
            (
                ['{""latitude"":1.5,""longitude"":2}'],
                [{"latitude": 1.5, "longitude": 2}],
            ),
            (["[1", "{"], ["[1", "{"]),
            (["2020-01-02T03:04:05.678901Z"], [SOME]),
            (["1900-01-01T02:00+02:00", "1900-01-01"], [OLD, OLD]),
            (["2020-01-02 and later"], ["2020-01-02 and later"]),
            (["P3DT5.000007S", "PT1M"], [LONG, datetime.timedelta(minutes=1)]),
            (["P1Y2M", "P2W"], [14 * MONTH, datetime.timedelta(weeks=2)]),
            (["P-1M1DT1H"], [datetime.timedelta(days=1, hours=1) - MONTH]),
            (["P999999999Y"], ["P999999999Y"]),
            (["P1M", "P"], ["P1M", "P"]),
            (["a", "1"], ["a", "1"]),
        ],
        ids=str,
    )
    def test_types_are_those_that_all_values_have(self, texts, wanted, tmp_path):
        assert self.read(tmp_path, *texts) == wanted

    @pytest.mark.parametrize("text", ["1", "1.0", "true"])
    def test_one_is_of_the_type_it_is_written_in(self, text, tmp_path):
        wanted = {"1": int, "1.0": float, "true": bool}[text]
        assert type(self.read(tmp_path, text)[0]) is wanted

    def test_a_name_in_gz_is_packed(self, saved):
        with gzip.open(saved / "graph.csv.gz", "rt", encoding="utf-8") as file:
            assert file.readline().startswith("_id,_labels,amount,begin,count,from")

    def test_what_is_packed_is_read(self, saved):
        assert plain(stores(saved)["gz"].read()) == plain(hand_made())

    def test_infinite_numbers_are_kept(self, tmp_path):
        store = lpg.CsvStore(tmp_path / "graph.csv")
        store.save(hand_made())
        store.write("Filing", "amount", [108, 109], [np.inf, -np.inf])
        assert store.read().vertices["amount"].dropna().abs().max() == np.inf

    @pytest.mark.parametrize(
        ("text", "error"),
        [
            (b"_id,_labels,_start,_end\n1,:A,,\n", r"columns \['_type'\] are missing"),
            (b"", "no table"),
            (HEAD.encode() + b"1,:A,\xff,,,\n", "no table"),
            (HEAD.encode() + b"1,2,3,4,5,6,7,8\n1,2,3,4,5,6,7,8,9\n", "no table"),
        ],
    )
    def test_damage_is_told(self, text, error, tmp_path):
        path = tmp_path / "graph.csv"
        path.write_bytes(text)
        with pytest.raises(DataFormatError, match=error):
            lpg.CsvStore(path).read()

    @pytest.mark.parametrize("cut", [0, 30])
    def test_damage_to_what_is_packed_is_told(self, cut, tmp_path):
        packed = gzip.compress(self.HEAD.encode() + b"1,:A,x,,,\n")
        path = tmp_path / "graph.csv.gz"
        path.write_bytes(packed[:cut] or b"plain")
        with pytest.raises(DataFormatError, match="no table"):
            lpg.CsvStore(path).read()

    def test_edges_to_nothing_are_told(self, tmp_path):
        path = tmp_path / "graph.csv"
        path.write_text(self.HEAD + "1,:A,,,,\n,,,1,2,R\n", encoding="utf-8")
        with pytest.raises(ConfigError, match=r"1 ends of edges .*\[2\]"):
            lpg.CsvStore(path).read()


class TestLadybug:
    OTHERS = (
        "CREATE NODE TABLE Person(name STRING PRIMARY KEY, age INT32, born DATE)",
        "CREATE NODE TABLE City(id INT64 PRIMARY KEY, seen TIMESTAMP, area FLOAT)",
        "CREATE REL TABLE Lives(FROM Person TO City, FROM City TO City, since INT64)",
        "CREATE (:Person {name: 'Ann', age: 30, born: date('2020-01-02')})",
        "CREATE (:Person {name: 'Bob'})",
        "CREATE (:City {id: 7, seen: timestamp('1900-01-01'), area: 0.5})",
        "MATCH (p:Person {name: 'Ann'}), (c:City) CREATE (p)-[:Lives {since: 3}]->(c)",
        "MATCH (c:City) CREATE (c)-[:Lives]->(c)",
    )

    @pytest.fixture
    def others(self, tmp_path):
        run(tmp_path / "others.db", *self.OTHERS)
        return database(tmp_path / "others.db")

    def test_what_others_made_is_read(self, others):
        day = datetime.datetime(2020, 1, 2, tzinfo=UTC)
        ann = {"_id": "Ann", "name": "Ann", "age": 30, "born": day}
        city = {"_id": 7, "_labels": ("City",), "id": 7, "seen": OLD, "area": 0.5}
        assert plain(others.read()) == [
            [
                {**ann, "_labels": ("Person",)},
                {"_id": "Bob", "_labels": ("Person",), "name": "Bob"},
                city,
            ],
            [
                {"_start": "Ann", "_end": 7, "_type": "Lives", "since": 3},
                {"_start": 7, "_end": 7, "_type": "Lives"},
            ],
        ]

    def test_what_others_made_is_written(self, others):
        others.write("Person", "score", ["Bob"], [0.5])
        assert values(others.read(), "score") == {"Ann": None, "Bob": 0.5, 7: None}

    def test_what_others_made_is_copied(self, others, tmp_path):
        target = database(tmp_path / "graph.db")
        lpg.copy(others, target)
        assert plain(target.read()) == plain(others.read())

    def test_keys_that_tables_share_are_told_apart(self, tmp_path):
        make = "CREATE NODE TABLE {0}(id INT64 PRIMARY KEY)"
        both = [make.format(name) for name in "AB"] + ["CREATE (:A {id: 1})"]
        edge = [
            "CREATE (:B {id: 1})",
            "CREATE REL TABLE R(FROM A TO B)",
            "MATCH (a:A), (b:B) CREATE (a)-[:R]->(b)",
        ]
        run(tmp_path / "graph.db", *both, *edge)
        store = database(tmp_path / "graph.db")
        store.write("B", "x", ["B:1"], [5])
        assert plain(store.read()) == [
            [
                {"_id": "A:1", "_labels": ("A",), "id": 1},
                {"_id": "B:1", "_labels": ("B",), "id": 1, "x": 5},
            ],
            [{"_start": "A:1", "_end": "B:1", "_type": "R"}],
        ]

    def test_a_database_without_tables_is_an_empty_graph(self, tmp_path):
        run(tmp_path / "graph.db", "RETURN 1")
        assert plain(database(tmp_path / "graph.db").read()) == [[], []]

    def test_a_key_of_another_type_is_told(self, ladybug):
        with pytest.raises(ConfigError, match=r"'count' of Entity is INT64: .*STR"):
            ladybug.write("Entity", "count", [102], ["many"])

    def test_an_error_in_one_table_undoes_what_was_written_in_others(self, tmp_path):
        labels = objects([("A", "C"), ("B", "C")])
        vertices = pd.DataFrame({"_id": objects([1, 2]), "_labels": labels})
        vertices["x"] = objects([None, "text"])
        edges = pd.DataFrame(columns=["_start", "_end", "_type"], dtype=object)
        store = database(tmp_path / "graph.db")
        store.save(lpg.PropertyGraph(vertices, edges))
        with pytest.raises(ConfigError, match="'x' of B is STRING"):
            store.write("C", "x", [1, 2], [1, 2])
        assert values(store.read(), "x") == {1: None, 2: "text"}

    @pytest.mark.parametrize(
        ("column", "error"),
        [
            ({"x": [1, "a"]}, "'x' cannot be a column"),
            ({"x": [2**70, 1]}, "'x' cannot be a column"),
            ({"x": [b"a", b"b"]}, "'x' cannot be a column.*binary"),
            ({"_key": [1, 2]}, "got key='_key'"),
            ({"a": [1, 2], "A": [1, 2]}, "Duplicated column name"),
            ({"_id": [0.5, 1.5]}, "type='DOUBLE'"),
        ],
        ids=str,
    )
    def test_what_has_no_column_is_told(self, column, error, tmp_path):
        table = {"_id": [1, 2], "_labels": [("A",), ("A",)], **column}
        vertices = pd.DataFrame({key: objects(each) for key, each in table.items()})
        edges = pd.DataFrame(columns=["_start", "_end", "_type"], dtype=object)
        graph = lpg.PropertyGraph(vertices, edges)
        store = database(tmp_path / "graph.db")
        with pytest.raises(ConfigError, match=error):
            store.save(graph)

    def test_names_may_be_any(self, tmp_path):
        odd = "it's `odd` \\ RETURN"
        graph = hand_made()
        vertices = graph.vertices.rename(columns={"count": odd})
        vertices["_labels"] = objects([(odd,), ("_",), (), ("RETURN",)] * 3)
        edges = graph.edges.assign(_type=[odd, "return"] * 4 + ["_"])
        graph = lpg.PropertyGraph(vertices, edges.rename(columns={"number": odd}))
        store = database(tmp_path / "graph.db")
        store.save(graph)
        assert plain(store.read()) == plain(graph)

    def test_a_point_without_a_field_that_others_have_has_none(self, ladybug):
        flat = {"latitude": 1.0, "longitude": 2.0}
        ladybug.write("Filing", "at", [108, 109], [flat, {**flat, "height": 3.0}])
        assert values(ladybug.read(), "at")[108] == {**flat, "height": None}

    def test_numbers_in_numpy_are_written(self, ladybug):
        ladybug.write("Filing", "p", [108, 109], np.array([0.5, np.nan], np.float32))
        found = values(ladybug.read(), "p")
        assert (found[108], found[109]) == (0.5, None)

    def test_a_file_that_is_no_database_is_told(self, tmp_path):
        path = tmp_path / "graph.db"
        path.write_text("hello " * 1000, encoding="utf-8")
        with pytest.raises(ConfigError, match="not a valid"):
            database(path).read()

    def test_nothing_is_made_where_nothing_is(self, tmp_path):
        store = database(tmp_path / "graph.db")
        with pytest.raises(DataMissing, match="no such database"):
            store.write("A", "x", [1], [1])
        assert not store.path.exists()

    @pytest.mark.parametrize("package", ["ladybug", "pyarrow"])
    def test_what_to_install_is_told(self, package, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, package, None)
        store = database(tmp_path / "graph.db")
        with pytest.raises(ConfigError, match=r"pip install 'hpcjax\[graphdb\]'"):
            store.save(hand_made())
