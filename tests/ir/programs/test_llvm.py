"""Graphs of LLVM-IR: the worked example, and what a terminator leads to."""

import dataclasses
import json
import sys

import networkx as nx
import numpy as np
import pytest

from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.ir import programs
from hpcjax.ir.programs import CALL, CONTROL, DATA
from tests.ir.programs.modules import FIB, drawn, real


def named(graph, flow):
    """The edges of a flow: texts of both ends, and the position."""
    return sorted(
        (graph.texts[source], graph.texts[target], position)
        for position, source, target in graph.edges(flow)
    )


@pytest.mark.parametrize(
    ("variables", "vertices", "edges"),
    [("ssa", [13, 10, 4], [12, 27, 6]), ("per_use", [13, 11, 4], [12, 28, 6])],
)
def test_the_worked_example_has_the_references_graph(variables, vertices, edges):
    graph = programs.from_llvm_ir(FIB, variables)
    assert [graph.count(kind) for kind in range(3)] == vertices
    assert [len(graph.edges(flow)) for flow in range(3)] == edges
    second = [edge for edge in named(graph, CONTROL) if edge[2]]
    assert second == [("br", "add", 1)]
    calls = ["[external] icmp", "call icmp", "call icmp"]
    calls += ["ret [external]", "ret call", "ret call"]
    assert [" ".join(edge[:2]) for edge in named(graph, CALL)] == calls
    assert graph.texts[0] == "[external]"
    assert set(graph.texts[13:]) <= {"i32", "i1"}


SWITCH = """
declare void @stop()
define i32 @f(i32 %x) {
  switch i32 %x, label %d [ i32 1, label %a
                            i32 7, label %d ]
a:
  call void @stop()
  ret i32 7
d:
  %c = icmp slt i32 %x, 2
  br i1 %c, label %a, label %d
dead:
  br label %a
}
"""


def test_a_switch_has_its_cases_and_dead_blocks_lead_nowhere():
    graph = programs.from_llvm_ir(SWITCH)
    found = named(graph, CONTROL)
    assert found == [
        *[("br", "call", 0), ("br", "icmp", 1), ("call", "ret", 0)],
        *[("icmp", "br", 0), ("switch", "call", 1)],
        *[("switch", "icmp", 0), ("switch", "icmp", 2)],
    ]
    constants = [
        (position, graph.texts[target])
        for position, source, target in graph.edges(DATA)
        if graph.kinds[source] == programs.CONSTANT
    ]
    # The 7 that is returned is the 7 of a case.
    assert graph.count(programs.CONSTANT) == 3
    assert constants == [(0, "ret"), (1, "icmp"), (2, "switch"), (4, "switch")]
    assert ("call", "; undefined function", 0) in named(graph, CALL)
    assert ("; undefined function", "[external]", 0) in named(graph, CALL)


INVOKE = """
declare i32 @p(...)
define i32 @g() {
  ret i32 1
}
define i32 @f() personality ptr @p {
  %1 = invoke i32 @g() to label %ok unwind label %bad
ok:
  ret i32 %1
bad:
  %2 = landingpad { ptr, i32 } cleanup
  ret i32 0
}
"""


def test_an_invoke_calls_but_in_the_release_and_goes_on_at_two_places():
    graph, old = (
        programs.from_llvm_ir(INVOKE, strict_release=flag) for flag in (False, True)
    )
    assert ("invoke", "ret", 0) in named(graph, CALL)
    assert "invoke" not in {edge[0] for edge in named(old, CALL)}
    assert named(graph, CONTROL)[:2] == [
        ("invoke", "landingpad", 1),
        ("invoke", "ret", 0),
    ]


PASSED = """
declare i32 @h(ptr, i32)
define i32 @f(i32 %a) {
  %1 = call i32 @h(ptr @f, i32 %a)
  ret i32 %1
}
"""


def test_operands_are_counted_with_those_that_are_no_vertices():
    found = named(programs.from_llvm_ir(PASSED), DATA)
    assert found == [("call", "i32", 0), ("i32", "call", 1), ("i32", "ret", 0)]


def test_the_contracted_graph_goes_from_maker_to_user():
    graph = programs.from_llvm_ir(FIB)
    small, kept = programs.cdfg(graph)
    assert kept.tolist() == list(range(13))
    assert named(small, CONTROL) == named(graph, CONTROL)
    assert ("call", "add", 0) in named(small, DATA)
    assert len(small.edges(DATA)) == 10  # one for each use of a result
    assert small.edges(CALL) == []


def test_networkx_reads_the_graph():
    for graph in (programs.from_llvm_ir(FIB), drawn()[0]):
        form = json.loads(graph.to_json())
        read = nx.node_link_graph(form, edges="links")
        edges = [[d["flow"], d["position"], s, t] for s, t, d in read.edges(data=True)]
        columns = (graph.flow, graph.position, graph.source, graph.target)
        assert sorted(edges) == sorted(np.stack(columns, axis=1).tolist())
        texts = [read.nodes[number]["text"] for number in range(len(graph.texts))]
        assert texts == list(graph.texts)


def test_words_are_counted_and_unknown_ones_are_the_last_number():
    words = programs.vocabulary(real()[:3])
    counts = [sum(g.texts.count(word) for g in real()[:3]) for word in words]
    assert counts == sorted(counts, reverse=True)
    numbers = real()[0].numbers(words[1:])
    assert (numbers == len(words) - 1).sum() == real()[0].texts.count(words[0])


def test_what_is_no_program_is_refused(monkeypatch):
    with pytest.raises(DataFormatError, match=r"x\.ll: LLVM \d+\..*expected"):
        programs.from_llvm_ir("define i32 @f(", name="x.ll")
    with pytest.raises(DataFormatError, match="a function with a body is needed"):
        programs.from_llvm_ir("declare void @f()")
    wrong: str = "uses"
    with pytest.raises(ConfigError, match="variables must be one of"):
        programs.from_llvm_ir(FIB, wrong)
    graph = programs.from_llvm_ir(FIB)
    with pytest.raises(ConfigError, match=r"target must be in \[0, 27\)"):
        dataclasses.replace(graph, target=graph.target + 20)
    with pytest.raises(ConfigError, match="an entry for each vertex"):
        dataclasses.replace(graph, kinds=graph.kinds[1:])
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    with pytest.raises(ConfigError, match=r"pip install 'hpcjax\[ir\]'"):
        programs.from_llvm_ir(FIB)
