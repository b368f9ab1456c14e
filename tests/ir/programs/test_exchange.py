"""Graphs against those of the reference's own program, and in its forms."""

import collections
import functools
import json
import pathlib
import shutil
import subprocess
import tarfile

import networkx as nx
import numpy as np
import pytest

from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.data import program_source
from hpcjax.ir import programs
from hpcjax.ir.programs import CALL, CONSTANT, CONTROL, DATA, INSTRUCTION
from tests.ir.programs.modules import FIB, draw_module, drawn

ARCHIVE = pathlib.Path(__file__).parent / "reference.tar.xz"
ARRAYS = ("kinds", "functions", "flow", "position", "source", "target")


@functools.cache
def outputs():
    """What `llvm2graph-10` wrote, and the modules that no data set has."""
    with tarfile.open(ARCHIVE) as archive:
        return {each.name: archive.extractfile(each).read() for each in archive}


def read(text):
    """The graph as the release makes it."""
    return programs.from_llvm_ir(text, "per_use", strict_release=True)


def named(graph, flow):
    """The edges of a flow by the texts of their ends."""
    rows = graph.edges(flow)
    return sorted((at, graph.texts[source], graph.texts[to]) for at, source, to in rows)


def exact(graph):
    """The graph but for the numbers of values: these are what makes and uses them."""
    own = np.flatnonzero(graph.kinds == INSTRUCTION).tolist()
    place = {vertex: number for number, vertex in enumerate(own)}
    uses, makers = collections.defaultdict(list), {}
    for position, source, target in graph.edges(DATA):
        if target in place:
            uses[source].append((place[target], position))
        else:
            makers[target] = place[source]
    values = collections.Counter(
        (kind, graph.texts[n], makers.get(n), tuple(sorted(uses[n])))
        for n, kind in enumerate(graph.kinds.tolist())
        if kind != INSTRUCTION
    )
    edges = [
        sorted((at, place[source], place[to]) for at, source, to in graph.edges(flow))
        for flow in (CONTROL, CALL)
    ]
    return [graph.texts[n] for n in own], edges, values


def of_kind(graph, kind):
    """The texts of vertices; without pointers, whose types LLVM no longer tells."""
    every = zip(graph.texts, graph.kinds, strict=True)
    return collections.Counter(
        text for text, own in every if own == kind and text not in POINTERS
    )


POINTERS = {"ptr", "struct*", "void (i8*)*"}


def compare(found, wanted):
    """Asserts that a real file has the release's graph, but for constants' casts."""
    assert of_kind(found, INSTRUCTION) == of_kind(wanted, INSTRUCTION)
    assert found.count(programs.VARIABLE) == wanted.count(programs.VARIABLE)
    for flow in (CONTROL, CALL):
        assert named(found, flow) == named(wanted, flow)
    plain = [of_kind(graph, CONSTANT) for graph in (found, wanted)]
    assert plain[0] == collections.Counter(
        {text: count for text, count in plain[1].items() if "*" not in text}
    )
    assert -4 <= found.count(CONSTANT) - wanted.count(CONSTANT) <= -2


@pytest.mark.acceptance("programl", 1)
@pytest.mark.acceptance("programl", 8)
def test_real_files_have_the_graphs_of_the_reference():
    texts, done = program_source.read_texts("poj104"), 0
    for name, content in outputs().items():
        if name.endswith(".pb") and not name.startswith("drawn"):
            text = texts[name.replace(".pb", ".ll")].decode(errors="replace")
            compare(read(text), programs.from_proto(content, name))
            done += 1
    assert done == 30


@pytest.mark.acceptance("programl", 1)
def test_drawn_modules_have_exactly_the_graphs_of_the_reference():
    kept = {name for name in outputs() if name.startswith("drawn")}
    for name in sorted(each for each in kept if each.endswith(".ll")):
        wanted = programs.from_proto(outputs()[name.replace(".ll", ".pb")])
        assert exact(read(outputs()[name].decode())) == exact(wanted)
    assert len(kept) == 24


@pytest.mark.slow
@pytest.mark.acceptance("programl", 1)
@pytest.mark.skipif(
    shutil.which("llvm2graph-10") is None,
    reason="llvm2graph-10 of the wheel programl 0.3.2 is not on the path",
)
def test_many_graphs_are_those_that_the_reference_makes():
    def run(text):
        command = ["llvm2graph-10", "--stdout_fmt=pb"]
        done = subprocess.run(command, input=text, capture_output=True, check=True)
        return programs.from_proto(done.stdout)

    done = 0
    for _, text in sorted(program_source.read_texts("poj104").items())[:210]:
        try:
            found = read(text.decode(errors="replace"))
        except DataFormatError:  # of a form that LLVM no longer reads
            continue
        compare(found, run(text))
        done += 1
    assert done >= 200
    for seed in range(500):
        text = draw_module(seed)
        assert exact(read(text)) == exact(run(text.encode()))


def equal(one, two):
    assert one.texts == two.texts
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
        assert getattr(one, name).dtype == getattr(two, name).dtype == np.int32


@pytest.mark.acceptance("programl", 8)
def test_a_graph_comes_back_bit_for_bit():
    made = [programs.from_proto(outputs()["000.pb"]), *drawn()[:9]]
    far = programs.from_jaxpr(lambda x: x * 2, np.ones(300, "f4"))
    for graph in (*made, far, programs.cdfg(made[0])[0]):
        content = programs.to_proto(graph)
        equal(programs.from_proto(content), graph)
        assert programs.to_proto(programs.from_proto(content)) == content
        equal(programs.from_json(graph.to_json()), graph)


def test_a_flow_chart_has_each_vertex_and_edge():
    """Labels are coded where they would end, or be markup."""
    one = programs.graph.from_rows(
        [(0, "[external]", -1), (1, 'a"<#', 0), (2, "é", -1)],
        [(0, 0, 0, 1), (1, 2, 2, 0), (2, 1, 1, 1)],
    )
    assert one.to_mermaid() == (
        'flowchart LR\n  0["[external]"]\n  1("a#34;#60;#35;")\n  2{{"é"}}\n'
        "  0 -->|0| 1\n  2 -.->|2| 0\n  1 ==>|1| 1\n"
    )


def test_bytes_are_those_of_the_wire_format():
    """By hand: a tag is 8 · field + type, a number has 7 bits a byte, lowest first."""
    one = programs.graph.from_rows(
        [(0, "[external]", -1), (0, "ret", 0), (2, "é", -1)], [(1, 300, 2, 1)]
    )
    assert programs.to_proto(one) == (
        b"\x0a\x0c\x12\x0a[external]"  # node: text
        b"\x0a\x05\x12\x03ret"
        b"\x0a\x06\x08\x02\x12\x02\xc3\xa9"  # node: type 2, text
        b"\x12\x09\x08\x01\x10\xac\x02\x18\x02\x20\x01"  # edge: all four
        b"\x22\x00\x2a\x00"  # a function and the module
    )


def test_a_file_cut_anywhere_is_refused_and_names_the_byte():
    content = programs.to_proto(programs.from_llvm_ir(FIB))
    for size in range(len(content)):
        with pytest.raises(DataFormatError, match=rf"a\.pb: cut short at byte {size}"):
            programs.from_proto(content[:size], "a.pb")


ROOT = b"\x0a\x0c\x12\x0a[external]"
MINUS_ONE = b"\xff" * 9 + b"\x01"


def test_fields_of_others_are_passed_over_whatever_they_hold():
    others = b"\x48" + MINUS_ONE  # 9, a number
    others += b"\x51" + bytes(8) + b"\x5d" + bytes(4)  # 10 and 11, of fixed sizes
    others += b"\x62\x02\x08\x07"  # 12, bytes
    node, edge = b"\x12\x0a[external]", b"\x08\x01\x10\x02"
    parts = [b"\x0a" + bytes([len(node + others)]) + node + others]
    parts += [b"\x12" + bytes([len(edge + others)]) + others + edge]
    found = programs.from_proto(others + b"".join(parts) + b"\x2a\x00" + others)
    assert found.texts == ("[external]",)
    assert found.edges(DATA) == [(2, 0, 0)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x0b", "damaged at byte 0: wire type 3"),
        (b"\x2a\x00\x00\x00", "damaged at byte 2: field 0"),
        (ROOT + b"\x12\x0b\x10" + MINUS_ONE + b"\x2a\x00", "no graph of a program"),
        (b"\x80" * 11, "damaged at byte 0: a number of more than ten bytes"),
        (b"\x08\x01", "damaged: a number in the place of a message"),
        (b"\x0a\x02\x10\x01\x2a\x00", "damaged at byte 2: type of field 2"),
        (b"\x0a\x03\x12\x01\xff\x2a\x00", "codec can't decode"),
        (b"\x2a\x00", r"vertex 0 must be the instruction '\[external\]'"),
        (b"\x0a\x0c\x12\x0a[external]\x0a\x02\x08\x03\x2a\x00", "kinds must be in"),
        (b"\x0a\x0c\x12\x0a[external]\x0a\x03\x12\x01a\x2a\x00", "none of 0 functions"),
    ],
)
def test_damaged_bytes_are_refused(content, words):
    with pytest.raises(DataFormatError, match=words):
        programs.from_proto(content)


def test_json_that_is_no_graph_is_refused():
    form = json.loads(programs.from_llvm_ir(FIB).to_json())
    for change, words in (
        ({"links": None}, "TypeError"),
        ({"nodes": form["nodes"][1:]}, "ids must be the numbers of vertices"),
        ({"links": [{"flow": 0}]}, "KeyError: 'position'"),
        ({"links": [{**form["links"][0], "position": 1.5}]}, r"integers.*\(0, 1\.5"),
        ({"nodes": [{**form["nodes"][0], "text": None}]}, "text a string"),
        ({"links": [{**form["links"][0], "target": 99}]}, "target must be in"),
        ({"links": [{**form["links"][0], "target": 2**40}]}, "no graph of a program"),
    ):
        with pytest.raises(DataFormatError, match=rf"a\.json: .*{words}"):
            programs.from_json(json.dumps({**form, **change}), "a.json")


def test_what_a_file_cannot_say_is_refused():
    rows = [(0, "[external]", -1), (0, "ret", -1)]
    with pytest.raises(ConfigError, match="alone in no function: got 'ret'"):
        programs.to_proto(programs.graph.from_rows(rows, [(0, 0, 0, 1)]))
    rows = [(0, "[external]", -1), (0, "ret", 0), (0, "add", 0)]
    late = programs.graph.from_rows(rows, [(2, 0, 0, 2)])
    with pytest.raises(DataFormatError, match="vertex 2 must come first"):
        programs.from_json(late.to_json())


def test_networkx_reads_what_the_reference_wrote():
    graph = programs.from_proto(outputs()["000.pb"])
    form = nx.node_link_graph(json.loads(graph.to_json()), edges="links")
    assert form.number_of_edges() == len(graph.flow)
