"""Graphs of JAX functions, with what they need to run again."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from hpcjax.core.errors import ConfigError
from hpcjax.ir._to_jax import to_jax
from hpcjax.ir.graph import Dataflow
from hpcjax.ir.interpreter import Order, interpret
from hpcjax.ir.jaxprs import listed
from hpcjax.ir.sdfg import SDFG


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of trees of arrays as a graph.

    Attributes:
      graph: what it does.
      functions: of its library nodes, by their code.
      inputs: containers of the arguments' arrays, in their order.
      constants: values of other containers that it reads.
      outputs: containers of the results' arrays.
      trees: of the arguments and of the results.
      opaque: those of `functions` whose subsets are not known.
      source: the jaxpr that was read.
    """

    graph: SDFG
    functions: Mapping[str, Callable[..., Any]]
    inputs: tuple[str, ...]
    constants: Mapping[str, Any]
    outputs: tuple[str, ...]
    trees: tuple[Any, Any]
    opaque: frozenset[str] = frozenset()
    source: Any = None

    def rewrite(self, change: Callable[[SDFG], SDFG]) -> "Program":
        """Returns the program with a graph that a function makes of its own.

        Raises:
          ConfigError: the graph lacks an argument or a result, or has other shapes.
        """
        made = change(self.graph)
        for name in (*self.inputs, *self.constants, *self.outputs):
            if made.arrays.get(name) != self.graph.arrays[name]:
                raise ConfigError(f"the graph must keep container {name!r} as it is")
        return dataclasses.replace(self, graph=made)

    def to_jax(self, *, by_node: bool = False) -> Callable[..., Any]:
        """Returns the function, for jit, vmap and grad as any other.

        Args:
          by_node: run each top-level node as a program of its own, with its results
            in memory: what the graph costs as it stands.
        """
        run = to_jax(self.graph, functions=self.functions, by_node=by_node)
        return lambda *args: self._around(run, args)

    def interpret(self, *args: Any, order: Order = "forward") -> Any:
        """Returns what the graph means, element by element; see `ir.interpret`."""

        def run(values: Mapping[str, Any]) -> Mapping[str, Any]:
            return interpret(self.graph, values, functions=self.functions, order=order)

        return self._around(run, args)

    def dataflow(self) -> Dataflow:
        """Returns the operators of the function as it was read; see `ir.dataflow`."""
        return listed(self.source)

    def words(self) -> dict[str, int]:
        """Returns the words that its operations move, those that move most first.

        Each is a "map", "copy", "reduce", "einsum", or a primitive by name, before
        which there is "opaque " if it is; see `Traffic`.
        """
        found: dict[str, int] = {}
        for moved in self.graph.movement():
            name = moved.kind
            if moved.code:
                name = "einsum" if "->" in moved.code else moved.code.split()[0]
                name = f"opaque {name}" if moved.code in self.opaque else name
            found[name] = found.get(name, 0) + moved.words
        return dict(sorted(found.items(), key=lambda own: -own[1]))

    def opaque_words(self) -> int:
        """Returns the words that opaque nodes move."""
        return sum(n for name, n in self.words().items() if name.startswith("opaque "))

    def _around(self, run: Callable[..., Mapping[str, Any]], args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        if tree != self.trees[0]:
            raise ConfigError(f"arguments must be of {self.trees[0]}: got {tree}")
        values = dict(zip(self.inputs, map(plain, leaves), strict=True))
        made = run({**self.constants, **values})
        return jax.tree.unflatten(self.trees[1], [made[name] for name in self.outputs])


def plain(value: Any) -> Any:
    """Returns the data of random keys, and other arrays as they are."""
    dtype = getattr(value, "dtype", np.float32)
    keys = jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    return jax.random.key_data(value) if keys else value
