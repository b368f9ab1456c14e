"""Analyses of programs against NetworkX, which knows nothing of ours."""

import collections

import networkx as nx
import numpy as np
import pytest

from hpcjax.core.errors import ConfigError
from hpcjax.ir import programs
from hpcjax.ir.programs import CONTROL, DATA, INSTRUCTION, VARIABLE
from tests.ir.programs.modules import FIB, drawn, real


def part(graph, flow):
    found = nx.DiGraph()
    found.add_nodes_from(range(len(graph.texts)))
    found.add_edges_from(edge[1:] for edge in graph.edges(flow))
    return found


def distances(found, root):
    return max(nx.single_source_shortest_path_length(found, root).values()) + 1


def reachability(graph, root):
    control = part(graph, CONTROL)
    return nx.descendants(control, root) | {root}, distances(control, root)


def dominance(graph, root):
    """What no path leads to, from the entry or dead code's first, but by the root."""
    own = {
        n
        for n in np.flatnonzero(graph.kinds == INSTRUCTION).tolist()
        if graph.functions[n] == graph.functions[root]
    }
    control = part(graph, CONTROL).subgraph(own)
    begins = {n for n, degree in control.in_degree() if not degree}
    without = control.subgraph(own - {root})
    reached = [nx.descendants(without, n) | {n} for n in begins - {root}]
    return own - set().union(*reached), None


def data_dependence(graph, root):
    data = part(graph, DATA)
    found = nx.ancestors(data, root)
    known = {n for n in found if graph.kinds[n] == INSTRUCTION}
    return known, distances(data.reverse(), root)


def liveness(graph, root):
    """A variable is live if a way leads to a use of it that does not make it anew."""
    control, data = part(graph, CONTROL), part(graph, DATA)
    inside = (graph.kinds == INSTRUCTION) & (graph.functions >= 0)
    ends = [n for n in np.flatnonzero(inside).tolist() if not control.out_degree(n)]
    leaves = set(ends).union(*(nx.ancestors(control, n) for n in ends))
    live = set()
    for variable in np.flatnonzero(graph.kinds == VARIABLE).tolist():
        cut = control.copy()
        makers = list(data.predecessors(variable))
        cut.remove_edges_from(list(control.out_edges(makers)))
        for use in data.successors(variable):
            before = nx.ancestors(cut, use) | {use}
            if use in leaves and before & set(control.successors(root)):
                live.add(variable)
    both = nx.compose(control, data).to_undirected()
    steps = nx.single_source_shortest_path_length(both, root)
    return live, max(steps[v] for v in live) + 1


def subexpressions(graph, root):
    operands = collections.defaultdict(list)
    for _, source, target in graph.edges(DATA):
        operands[target].append(source)
    free = {"add", "fadd", "mul", "fmul", "and", "or", "xor"}
    keys = {
        n: (graph.texts[n], *(sorted(o) if graph.texts[n] in free else o))
        for n, o in operands.items()
        if graph.kinds[n] == INSTRUCTION
    }
    return {n for n, key in keys.items() if key == keys[root]}, 2


ORACLES = (reachability, dominance, data_dependence, liveness, subexpressions)


def compare(oracle, graphs, roots):
    """Compares all answers for as many roots, and returns how many there were."""
    name, done = oracle.__name__, 0
    for number, graph in enumerate(graphs):
        rng = np.random.default_rng(number)
        for root in programs.draw_roots(graph, name, rng):
            found = programs.ANALYSES[name](graph, root)
            wanted, steps = oracle(graph, root)
            assert set(np.flatnonzero(found.values)) == wanted
            assert steps in (found.steps, None)
            done += 1
            if done == roots:
                return done
    return done


@pytest.mark.acceptance("programl", 2)
@pytest.mark.parametrize("oracle", ORACLES, ids=lambda each: each.__name__)
def test_labels_are_those_of_networkx(oracle):
    """100 roots of each, of drawn modules with dead code and of real files."""
    done = compare(oracle, drawn(), 60)
    assert done + compare(oracle, real(), 100 - done) == 100


@pytest.mark.slow
@pytest.mark.acceptance("programl", 2)
@pytest.mark.parametrize("oracle", ORACLES, ids=lambda each: each.__name__)
def test_labels_of_many_roots_are_those_of_networkx(oracle):
    done = compare(oracle, drawn(200), 250)
    assert done + compare(oracle, real(120), 450 - done) >= 400


def test_drawn_modules_have_dead_code_and_loops_without_exit():
    dead = endless = 0
    for graph in drawn():
        control = part(graph, CONTROL)
        inside = np.flatnonzero((graph.kinds == INSTRUCTION) & (graph.functions >= 0))
        first = {function: n for n in inside[::-1] for function in [graph.functions[n]]}
        seen = [nx.descendants(control, n) | {n} for n in first.values()]
        dead += bool(set(inside.tolist()) - set().union(*seen))
        ends = [n for n in inside if not control.out_degree(n)]
        out = set(ends).union(*(nx.ancestors(control, n) for n in ends))
        endless += bool(set().union(*seen) - out)
    assert dead > 5
    assert endless > 5


def fib(task, root):
    graph = programs.from_llvm_ir(FIB)
    labels = programs.ANALYSES[task](graph, root)
    return np.flatnonzero(labels.values).tolist(), labels.steps, graph


@pytest.mark.acceptance("programl", 2)
def test_the_hand_check_of_the_worked_example():
    phi, icmp, call, ret = 9, 1, 4, 12
    assert fib("reachability", phi)[:2] == ([9, 10, 11, 12], 4)
    assert len(fib("reachability", icmp)[0]) == 12
    assert fib("dominance", icmp)[0] == list(range(1, 13))
    assert fib("dominance", 8)[0] == [8]
    assert fib("dominance", phi)[0] == [9, 10, 11, 12]
    graph = programs.from_llvm_ir(FIB)
    of = {maker: v for _, maker, v in graph.edges(DATA) if graph.kinds[v] == VARIABLE}
    argument = next(v for v in graph.preceding[DATA][icmp] if v not in of.values())
    assert fib("data_dependence", of[11])[0] == [3, 4, 5, 6, 7, 9, 10, 11]
    assert set(fib("liveness", icmp)[0]) == {argument, of[1], of[7]}
    assert set(fib("liveness", call)[0]) == {argument, of[4]}
    with pytest.raises(ConfigError, match="after which a variable is live"):
        programs.liveness(graph, ret)
    rng = np.random.default_rng(0)
    assert programs.draw_roots(graph, "subexpressions", rng) == []


def test_a_root_of_the_wrong_kind_is_refused():
    graph = programs.from_llvm_ir(FIB)
    for task, root, words in (
        ("reachability", 0, "an instruction of a function: got root=0"),
        ("dominance", 14, "an instruction of a function"),
        ("data_dependence", 1, "a variable that an instruction makes"),
        ("liveness", 26, "after which a variable is live"),
        ("subexpressions", 1, "with a common subexpression"),
        ("reachability", 27, r"root must be in \[0, 27\)"),
    ):
        with pytest.raises(ConfigError, match=words):
            programs.ANALYSES[task](graph, root)
    with pytest.raises(ConfigError, match="task must be one of"):
        programs.draw_roots(graph, "reach", np.random.default_rng(0))


def test_dominators_that_take_too_long_are_given_up(monkeypatch):
    monkeypatch.setattr(programs.analyses, "UPDATES", 3)
    with pytest.raises(ConfigError, match="dominators must be found in 3 updates"):
        fib("dominance", 1)
