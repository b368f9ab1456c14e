"""Graphs of JAX functions, as their jaxprs tell."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core

from hpcjax.core.errors import UnsupportedOp
from hpcjax.ir.jaxprs import Reader, inner_programs
from hpcjax.ir.programs.graph import (
    CONSTANT,
    CONTROL,
    DATA,
    INSTRUCTION,
    VARIABLE,
    Builder,
    ProgramGraph,
)

ENTRY = "<entry>"
RETURN = "<return>"
# Effects that are where they stand, on references, or only name a mesh's axis.
_IN_PLACE = ("ReadEffect", "WriteEffect", "AccumEffect", "InternalMutableArrayEffect")
_IN_PLACE += ("NamedAxisEffect",)


def from_jaxpr(function: Callable[..., Any], *args: Any) -> ProgramGraph:
    """Returns the graph of a JAX function, which is traced and not run.

    A jaxpr is a function: an instruction "<entry>", one for each equation, whose text
    is its primitive's, and "<return>", which uses the results; control goes through
    them in this order. An equation with inner jaxprs, such as of a scan, a branch, a
    loop or a custom derivative, calls each of them, and they return to it; one that
    several equations have is one function. Variables and constants have shape and
    dtype for text, "f32[128,64]"; what nothing uses is no vertex. An equal number of
    one type is one constant.

    Args:
      function: of trees of arrays.
      *args: arrays, or their shapes and dtypes.

    Raises:
      UnsupportedOp: an effect without an order, such as of `jax.debug.print`; it is
        named.

    References:
      Cummins et al.: ProGraML, ICML 2021; ChrisCummins/ProGraML,
      programl/ir/xla/hlo_module_graph_builder.cc, of which this follows the functions
      and texts, and the paper for what control and variables are.

    Examples:
      >>> graph = from_jaxpr(lambda x: x * x, jax.ShapeDtypeStruct((2,), "float32"))
      >>> graph.texts
      ('[external]', '<entry>', 'f32[2]', 'mul', 'f32[2]', '<return>')
      >>> graph.edges(DATA)
      [(0, 2, 3), (0, 3, 4), (0, 4, 5), (1, 2, 3)]
    """
    outer = jax.make_jaxpr(function)(*args).jaxpr
    builder = _Builder([outer])
    for number, jaxpr in enumerate(builder.programs):  # which grows
        builder.add_function(jaxpr, number)
    return builder.join([id(outer)])


class _Builder(Builder, Reader[int]):
    """A graph whose vertices stand for variables; -1 for one that is not used."""

    def __init__(self, programs: list[Any]) -> None:
        super().__init__()
        self.programs = programs
        self.used: set[Any] = set()
        self.number = self.last = 0

    def add_function(self, jaxpr: Any, number: int) -> None:
        """Adds what a jaxpr does, and lists those that it calls."""
        self.number, self.last = number, 0
        own = [v for eqn in jaxpr.eqns for v in eqn.invars] + jaxpr.outvars
        self.used = {v for v in own if not isinstance(v, core.Literal)}
        self._step(ENTRY, [], [])
        self.entries[id(jaxpr)] = self.last
        results = self.read(jaxpr, [self._variable(each) for each in jaxpr.invars])
        self._step(RETURN, results, [])
        self.exits[id(jaxpr)].append(self.last)

    def equation(self, eqn: Any, given: list[int]) -> list[int]:
        """Adds an instruction, and the calls of its programs."""
        programs = inner_programs(eqn)
        _check_effects(eqn, programs)
        made = self._step(eqn.primitive.name, given, eqn.outvars)
        for each in programs:
            inner = each.jaxpr if isinstance(each, core.ClosedJaxpr) else each
            if all(inner is not known for known in self.programs):
                self.programs.append(inner)
            self.sites.append((self.last, id(inner)))
        return made

    call = equation  # nothing is inlined

    def literal(self, variable: Any) -> int:
        """Returns the constant of a number."""
        text = _text(variable)
        key = text, np.asarray(variable.val, variable.aval.dtype).tobytes()
        if key not in self.constants:
            self.constants[key] = self.add(CONSTANT, text)
        return self.constants[key]

    def constant(self, variable: Any) -> int:
        """Adds the constant of an array."""
        return self.add(CONSTANT, _text(variable))

    def _variable(self, variable: Any) -> int:
        if variable not in self.used:
            return -1
        return self.add(VARIABLE, _text(variable), self.number)

    def _step(self, text: str, given: list[int], results: list[Any]) -> list[int]:
        """Adds the next instruction, and returns the variables that it makes."""
        vertex = self.add(INSTRUCTION, text, self.number)
        if self.last:
            self.edges.append((CONTROL, 0, self.last, vertex))
        self.last = vertex
        self.edges += [(DATA, place, each, vertex) for place, each in enumerate(given)]
        made = [self._variable(each) for each in results]
        self.edges += [(DATA, 0, vertex, each) for each in made if each >= 0]
        return made


def _check_effects(eqn: Any, programs: list[Any]) -> None:
    """Raises UnsupportedOp for effects of an equation's own that have no order."""
    own = eqn.effects - set().union(*(each.effects for each in programs))
    if free := sorted(str(each) for each in own if not _is_ordered(each)):
        raise UnsupportedOp(
            "effects must have an order, such as ordered=True says, to be on a way of "
            f"control: got {eqn.primitive.name!r} with {', '.join(free)}"
        )


def _is_ordered(effect: Any) -> bool:
    name = type(effect).__name__
    return name.startswith("Ordered") or name in _IN_PLACE


def _text(variable: Any) -> str:
    return variable.aval.str_short(short_dtypes=True)
