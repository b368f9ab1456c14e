"""Graphs of JAX functions against a direct walk of their jaxprs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.extend import core

from hpcjax.core.errors import UnsupportedOp
from hpcjax.ir import programs
from hpcjax.ir.programs import CALL, CONSTANT, CONTROL, DATA, INSTRUCTION

X = jax.ShapeDtypeStruct((2, 4), "float32")
WS = jax.ShapeDtypeStruct((3, 4, 4), "float32")


def network(ws, x):
    """The gradient of an MLP that scans over its layers."""

    def loss(ws):
        last, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)
        return jnp.sum(last**2)

    return jax.grad(loss)(ws)


def busy(ws, x):
    """Branches, loops, custom derivatives, and a function that is called twice."""
    del ws
    twice = jax.jit(lambda v: jax.nn.relu(v) * 2.0 + 2.0)
    y = jax.lax.cond(x.sum() > 0, twice, lambda v: v, x)
    y = jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + twice(c), y)
    return jax.grad(lambda v: twice(v).at[0].add(1.0).sum())(y) * y * y


def found_in(value):
    """The jaxprs in a parameter, however deep."""
    if isinstance(value, core.ClosedJaxpr):
        return [value.jaxpr]
    if isinstance(value, core.Jaxpr):
        return [value]
    if isinstance(value, tuple | list):
        return [each for part in value for each in found_in(part)]
    return []


def walk(function):
    """All jaxprs, the outer one first, each once; and who calls whom."""
    every, calls = [jax.make_jaxpr(function)(WS, X).jaxpr], []
    for jaxpr in every:
        for place, eqn in enumerate(jaxpr.eqns):
            for inner in found_in(tuple(eqn.params.values())):
                if all(inner is not each for each in every):
                    every.append(inner)
                number = next(n for n, each in enumerate(every) if each is inner)
                calls.append((every.index(jaxpr), place, number))
    return every, calls


def rows(graph):
    """Instructions of each function, in their order."""
    own = np.flatnonzero(graph.kinds == INSTRUCTION)[1:]
    count = graph.functions.max() + 1
    return [own[graph.functions[own] == n].tolist() for n in range(count)]


def uses(jaxpr, place):
    """What the instruction of a place uses: entry, equations, return."""
    steps = [[], *(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars]
    return [v for v in steps[place] if not isinstance(v, core.Literal)]


def makes(jaxpr, place):
    return [[], *(eqn.outvars for eqn in jaxpr.eqns), []][place]


@pytest.mark.acceptance("programl", 7)
@pytest.mark.parametrize("function", [network, busy])
def test_an_equation_is_an_instruction_and_an_operand_an_edge(function):
    graph = programs.from_jaxpr(function, WS, X)
    every, calls = walk(function)
    own = rows(graph)
    assert len(own) == len(every) > 2
    for jaxpr, places in zip(every, own, strict=True):
        names = [eqn.primitive.name for eqn in jaxpr.eqns]
        assert [graph.texts[n] for n in places] == ["<entry>", *names, "<return>"]
        control = [(0, one, two) for one, two in itertools.pairwise(places)]
        assert [e for e in graph.edges(CONTROL) if e[1] in places] == control
        vertex = {}
        for place, number in enumerate(places):
            operands = [[], *(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars][place]
            given = graph.preceding[DATA][number]
            for variable, source in zip(operands, given, strict=True):
                is_number = isinstance(variable, core.Literal)
                is_held = not is_number and variable in jaxpr.constvars
                kind = CONSTANT if is_number or is_held else programs.VARIABLE
                assert graph.kinds[source] == kind
                assert graph.texts[source] == str(variable.aval.str_short(True))
                if kind == programs.VARIABLE:
                    assert vertex.setdefault(variable, source) == source
                    # What makes it comes first.
                    assert all(n < number for n in graph.preceding[DATA][source])
        made = {v: n for place, n in enumerate(places) for v in makes(jaxpr, place)}
        for variable, source in vertex.items():
            maker = [made[variable]] if variable in made else []
            assert graph.preceding[DATA][source] == maker
        assert len(set(vertex.values())) == len(vertex)
    wanted = [(0, 0, own[0][0]), (0, own[0][-1], 0)]
    for caller, place, callee in calls:
        site, target = own[caller][place + 1], own[callee]
        wanted += [(0, site, target[0]), (0, target[-1], site)]
    assert graph.edges(CALL) == sorted(wanted)


def needed(jaxpr, place):
    """A place, and those before it whose results it needs, near or far."""
    wanted, places = set(uses(jaxpr, place)), {place}
    for before in range(place - 1, 0, -1):
        if wanted & set(makes(jaxpr, before)):
            wanted |= set(uses(jaxpr, before))
            places.add(before)
    return places


def found(graph, task, root):
    return set(np.flatnonzero(programs.ANALYSES[task](graph, root).values).tolist())


@pytest.mark.acceptance("programl", 7)
@pytest.mark.parametrize("function", [network, busy])
def test_analyses_are_those_of_a_direct_walk(function):
    """All roots: what comes after, what is needed, and what is used later."""
    graph = programs.from_jaxpr(function, WS, X)
    for jaxpr, own in zip(walk(function)[0], rows(graph), strict=True):
        for place, number in enumerate(own):
            for task in ("reachability", "dominance"):
                assert found(graph, task, number) == set(own[place:])
            for variable in graph.following[DATA][number]:
                wanted = {own[n] for n in needed(jaxpr, place)}
                assert found(graph, "data_dependence", variable) == wanted
            after = range(place + 1, len(own))
            made_later = {v for n in after for v in makes(jaxpr, n)}
            live = {v for n in after for v in uses(jaxpr, n)} - made_later
            live -= set(jaxpr.constvars)
            if live:
                told = found(graph, "liveness", number)
                assert len(told) == len(live)
                makers = {n for v in told for n in graph.preceding[DATA][v]}
                made = {n for n in range(len(own)) if live & set(makes(jaxpr, n))}
                assert makers == {own[n] for n in made}


def test_what_is_computed_twice_is_found():
    graph = programs.from_jaxpr(lambda x: jnp.sin(x) * jnp.sin(x) + x * x, X)
    first, second = (n for n, text in enumerate(graph.texts) if text == "sin")
    labels = programs.subexpressions(graph, first)
    assert np.flatnonzero(labels.values).tolist() == [first, second]


def test_equal_numbers_of_one_type_are_one_constant_and_nothing_unused_is_told():
    held = np.arange(3, dtype="f4")

    def function(x, y):
        del y
        whole = jnp.int32(2) * jnp.arange(4)[0]
        return (x * 2.0 + 2.0) * 3.0 + held, whole

    graph = programs.from_jaxpr(function, np.ones(3, "f4"), np.ones(7))
    every = zip(graph.texts, graph.kinds, strict=True)
    constants = [text for text, kind in every if kind == CONSTANT]
    assert constants.count("f32[]") == 2
    assert constants.count("f32[3]") == 1
    assert "f32[7]" not in graph.texts


EFFECTS = {
    "debug_print": lambda x, ordered: jax.debug.print("{}", x, ordered=ordered),
    "debug_callback": lambda x, ordered: jax.debug.callback(str, x, ordered=ordered),
    "io_callback": lambda x, ordered: io_callback(print, None, x, ordered=ordered),
}


@pytest.mark.parametrize("name", EFFECTS)
@pytest.mark.parametrize("inside", [lambda f: f, jax.jit, jax.checkpoint])
def test_effects_without_an_order_are_refused_by_name(name, inside):
    free, ordered = (
        lambda x, flag=flag: (EFFECTS[name](x, flag), x)[1] for flag in (False, True)
    )
    with pytest.raises(UnsupportedOp, match=rf"got '{name}' with \w+"):
        programs.from_jaxpr(inside(free), X)
    assert name in programs.from_jaxpr(jax.jit(ordered), X).texts


def test_references_and_axes_are_no_effects_without_an_order():
    def function(x):
        total = jax.new_ref(jnp.zeros(()))
        total[...] += jax.lax.psum(x, "i").sum()
        return total[...]

    graph = programs.from_jaxpr(jax.vmap(function, axis_name="i"), X)
    assert "get" in graph.texts
