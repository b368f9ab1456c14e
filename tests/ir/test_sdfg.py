"""Graphs: what they move, what is not valid, and what the interpreter makes of them."""

import numpy as np
import pytest

from hpcjax import ir
from hpcjax.core.errors import ConfigError


def program(*maps, arrays=("A", "B"), size=6, symbols=()):
    """Maps over i of one tasklet each: (range, code, edges)."""
    made = ir.Builder("test", symbols)
    for name in arrays:
        made.array(name, size)
    for own, code, edges in maps:
        with made.map(i=own):
            made.tasklet(code, wcr=edges.pop("wcr", ""), **edges)
    return made


COPY = ("0:6", "b = a", {"a": "A[i]", "b": "B[i]"})


def test_words_are_volumes_and_fusing_operators_reads_once():
    made = ir.Builder("jacobi", symbols=("n",))
    made.array("A", "n")
    made.transient("T", "n")
    made.array("B", "n")
    for source, target in ("AT", "TB"):
        with made.map(i="1:n - 1"):
            edges = {
                "a": f"{source}[i - 1]",
                "b": f"{source}[i]",
                "c": f"{source}[i + 1]",
            }
            made.tasklet("d = a + b + c", **edges, d=f"{target}[i]")
    flow = ir.find_operators(made.build(), {"n": 10})
    assert flow.moved("map.1") == (2 * 8, 3 * 8, 8)
    assert flow.by_kind()["elementwise"].words == 2 * 4 * 8
    assert [(o.inputs, o.outputs) for o in flow.operators] == [
        (("A",), ("T.0",)),
        (("T.0",), ("B.0",)),
    ]
    fused = ir.fuse(flow, {"both": ("map.1", "map.2")})
    assert ir.movement(fused) == 3 * 8 + 8


def loop(times=3):
    """A graph that adds a row of xs to c in each run."""
    inner = ir.Builder("inner", symbols=("t", "n"))
    inner.array("xs", 3, "n")
    inner.array("c", "n")
    inner.transient("q", "n")
    with inner.map(i="0:n"):
        inner.tasklet("d = c + x", c="c[i]", x="xs[t, i]", d="q[i]")
    inner.copy("q", "c")
    made = ir.Builder("outer")
    made.array("xs", 3, 4)
    made.array("c", 4)
    body = inner.build(t=f"0:{times}")
    made.nested(body, times, "t", {"n": 4}, xs="xs", c="c")
    return made.build()


def test_nested_graphs_run_and_count_as_often_as_they_say():
    graph = loop()
    xs = np.arange(12.0).reshape(3, 4)
    found = ir.interpret(graph, {"xs": xs, "c": np.ones(4)})
    np.testing.assert_array_equal(found["c"], 1 + xs.sum(0))
    assert ir.find_operators(graph).total() == (3 * 4, 3 * (8 + 4), 3 * (4 + 4))


def test_library_nodes_reductions_and_given_functions():
    made = ir.Builder("mixed")
    for name, shape in {
        "A": (2, 3),
        "B": (3, 4),
        "C": (2, 4),
        "m": (2,),
        "s": (2,),
    }.items():
        made.array(name, *shape)
    made.library("ij,jk->ik", ["A", "B"], "C")
    made.reduce("maximum", "C", "m", 1)
    made.library("sort", ["m"], "s")
    a, b = np.arange(6.0).reshape(2, 3), -np.arange(12.0).reshape(3, 4)
    graph = made.build()
    given = {"A": a, "B": b}
    found = ir.interpret(graph, given, functions={"sort": lambda x: (np.sort(x),)})
    np.testing.assert_array_equal(found["s"], np.sort((a @ b).max(1)))
    assert ir.find_operators(graph).moved("library.1").flops == 2 * 2 * 3 * 4
    with pytest.raises(ConfigError, match=r"library.2: no function 'sort' was given"):
        ir.interpret(graph, given)


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        (
            [("0:7", "b = a", {"a": "A[i]", "b": "B[0]"})],
            r"state.1: tasklet.1, A\[i\]: el",
        ),
        (
            [("0:3", "b = a", {"a": "A[-i]", "b": "B[i]"})],
            r"\(-1,\) is not within \[6\]",
        ),
        ([("0:n", "b = a", {"a": "A[i]", "b": "B[i]"})], "undefined symbol 'n'"),
        ([("0:6", "b = a + k", {"a": "A[i]", "b": "B[i]"})], "undefined symbol 'k'"),
        (
            [("0:6", "b = evil(a)", {"a": "A[i]", "b": "B[i]"})],
            "no elementwise function 'evil'",
        ),
        ([("0:6", "b = a.real", {"a": "A[i]", "b": "B[i]"})], "assignments of calls"),
        ([("0:6", "b = a", {"a": "A[0:2]", "b": "B[i]"})], "must be one element"),
        ([("0:6", "b = a", {"a": "A[i, i]", "b": "B[i]"})], "each of 1 axes"),
        ([("0:6", "b = a", {"a": "A[i]", "b": "B[0]"})], r"written by two .*B\[0\]"),
        ([("0:5", "b = a", {"a": "B[i + 1]", "b": "B[i]"})], "read, written by two"),
        ([("0:6", "b = a", {"a": "A[i]", "b": "B[i]", "wcr": "sub"})], "wcr must be"),
        ([("0:6", "b = b + a", {"a": "A[i]", "b": "B[i]"})], "undefined symbol 'b'"),
        ([("0:6", "b = a & 1", {"a": "A[i]", "b": "B[i]"})], "assignments of calls"),
        ([("0:6", "b = a <", {"a": "A[i]", "b": "B[i]"})], "assignments of calls"),
        ([("0:6", "b = 'x'", {"b": "B[i]"})], "assignments of calls"),
        (
            [("0:6", "b = pi(a)", {"a": "A[i]", "b": "B[i]"})],
            "no elementwise function 'pi'",
        ),
        ([("0:6", "b = i", {"i": "A[i]", "b": "B[i]"})], "'i' is a parameter"),
    ],
)
def test_graphs_that_are_not_valid_are_told_by_state_and_edge(maps, message):
    with pytest.raises(ConfigError, match=message):
        program(*[(own, code, dict(edges)) for own, code, edges in maps]).build()


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("reduce", ("add", "V", "B[0:3]", 0), r"B\[0:3\] must be of shape \(4,\)"),
        ("reduce", ("add", "V", "B"), r"must be of shape \(3, 4\): is \(4,\)"),
        ("reduce", ("add", "V", "B", 2), "axes"),
        ("reduce", ("add", "V", "B", 0, -2), "axes"),
        ("copy", ("V", "B"), r"must be of shape \(3, 4\)"),
        ("library", ("ij,jk->i", ["V"], "B"), "is not for shapes"),
        ("library", ("ij,ji->j", ["V", "V"], "B"), "is not for shapes"),
        ("library", ("ij->i", ["V"], "B"), r"must be of shape \(3,\)"),
    ],
)
def test_results_of_other_shapes_are_told_before_they_run(kind, given, message):
    made = ir.Builder("test")
    made.array("V", 3, 4)
    made.array("B", 4)
    getattr(made, kind)(*given)
    with pytest.raises(ConfigError, match=rf"state.1: {kind}.1.*{message}"):
        made.build()


def test_integers_are_reduced_and_values_within_code_are_its_own():
    made = ir.Builder("test")
    made.array("V", 2, 2, dtype="int64")
    made.array("B", 2, dtype="int64")
    made.reduce("maximum", "V", "B", 0)
    with made.map(i="0:2"):
        made.tasklet("t = a + i; b = t * t", a="B[i]", b="B[i]")
    found = ir.interpret(made.build(), {"V": [[1, 7], [3, 2]]})
    assert found["B"].tolist() == [9, 64]


def test_a_counter_begins_at_zero_where_races_are_sought():
    made = ir.Builder("test", ("t",))
    made.array("A", 8)
    with made.map(i="0:2"):
        made.tasklet("b = a", a="A[2*t + 1 - i]", b="A[i]")
    with pytest.raises(ConfigError, match="read, written by two iterations"):
        made.build(t="0:3")


def test_other_wrong_graphs_and_values_are_named():
    made = program(COPY)
    with pytest.raises(ConfigError, match="there is no container 'C'"):
        made.tasklet("b = a", a="C[0]", b="B[0]")
    with pytest.raises(ConfigError, match="must be like"):
        made.tasklet("b = a", a="A[", b="B[0]")
    graph = program(COPY, size="n + 5", symbols=("n",)).build()
    with pytest.raises(ConfigError, match="without values: n"):
        ir.interpret(graph, {})
    with pytest.raises(ConfigError, match="no symbol 'm'"):
        ir.find_operators(graph, {"m": 1})
    with pytest.raises(ConfigError, match=r"'A' has shape \(6,\): got \(2,\)"):
        ir.interpret(graph, {"A": [1, 2]}, {"n": 1})
    with pytest.raises(ConfigError, match="there is no container 'Z'"):
        ir.interpret(program(COPY).build(), {"Z": 1})
    with pytest.raises(ConfigError, match="an index must be affine"):
        made.array("C", "2 *")
    for given, message in (({"dtype": "floaty"}, "no dtype"), ({}, "symbol 'm'")):
        wrong = ir.Builder("wrong")
        wrong.array("A", "m", **given)
        with pytest.raises(ConfigError, match=message):
            wrong.build()
    inner = ir.Builder("inner", ("t",))
    inner.array("A", 6)
    with inner.map(i="0:t"):
        inner.tasklet("a = 0", a="A[i]")
    made.nested(inner.build(t="0:3"), 3, "t", A="A")
    with pytest.raises(ConfigError, match="sizes depend on the counter"):
        made.build()


@pytest.mark.acceptance("sdfg", 8)
@pytest.mark.parametrize("symbolic", [False, True])
def test_a_race_is_found_when_a_resolution_is_removed(symbolic):
    n, symbols = ("n", ("n",)) if symbolic else (6, ())
    values = {"n": 6} if symbolic else {}

    def histogram(wcr):
        made = ir.Builder("sum", symbols)
        made.array("A", n)
        made.array("s")
        with made.map(i=f"0:{n}"):
            made.tasklet("b = a", wcr=wcr, a="A[i]", b="s")
        return made.build()

    given = {"A": np.arange(6), "s": 0}
    for order in ("forward", "reverse", "drawn"):
        assert ir.interpret(histogram("add"), given, values, order=order)["s"] == 15
    with pytest.raises(ConfigError, match="written by two iterations"):
        ir.interpret(histogram(""), given, values)


@pytest.mark.acceptance("sdfg", 8)
@pytest.mark.parametrize(
    "edges",
    [
        {"a": "A[i]", "b": "B[0]"},
        {"a": "A[(i + 1) - 1]", "b": "A[5 - i]"},
        {"a": "B[0]", "b": "B[0]", "wcr": "add"},
    ],
)
def test_the_interpreter_sees_races_by_itself(edges, monkeypatch):
    monkeypatch.setattr("hpcjax.ir.interpreter.check", lambda *_: None)
    monkeypatch.setattr("hpcjax.ir.checks.check", lambda *_: None)
    graph = program(("0:6", "b = a", edges)).build()
    with pytest.raises(ConfigError, match=r"race in map.1: iterations"):
        ir.interpret(graph, {"A": np.arange(6), "B": np.zeros(6)})
