"""Makes graphs of data movement, node by node, of texts as in Python."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcjax.core.errors import ConfigError, nearest
from hpcjax.ir import affine, checks
from hpcjax.ir.affine import Affine, Index, Range
from hpcjax.ir.sdfg import SDFG, Array, Code, Map, Memlet, Nested, Node, State, assigned


class Builder:
    """Makes a graph, node by node; texts are read as in Python, ends exclusive.

    Examples:
      >>> program = Builder("axpy", symbols=("n",))
      >>> program.array("x", "n")
      >>> program.array("y", "n")
      >>> with program.map(i="0:n"):
      ...     program.tasklet("c = 2 * a + b", a="x[i]", b="y[i]", c="y[i]")
      >>> from hpcjax import ir
      >>> ir.find_operators(program.build(), {"n": 8}).total()
      Moved(flops=16, read=16, written=8)
    """

    def __init__(self, name: str, symbols: Sequence[str] = ()) -> None:
        self._graph = SDFG(name, {}, (), tuple(symbols))
        self._states: list[list[Node]] = [[]]
        self._open = self._states[0]
        self._count: dict[str, int] = {}

    def array(
        self, name: str, *shape: Index, dtype: str = "float64", transient: bool = False
    ) -> None:
        """Adds a container of a shape, a scalar without one."""
        if name in self._graph.arrays:
            raise ConfigError(f"there is a container {name!r} already")
        made = Array(tuple(map(Affine.of, shape)), dtype, transient)
        arrays = {**self._graph.arrays, name: made}
        self._graph = dataclasses.replace(self._graph, arrays=arrays)

    def transient(self, name: str, *shape: Index, dtype: str = "float64") -> None:
        """Adds a container that nothing outside of the graph sees."""
        self.array(name, *shape, dtype=dtype, transient=True)

    def state(self) -> None:
        """Begins another state."""
        self._open = []
        self._states.append(self._open)

    @contextlib.contextmanager
    def map(self, **ranges: str) -> Iterator[None]:
        """Adds a map over ranges such as `i="0:n:2"`, whose body is in the block."""
        around, self._open = self._open, []
        own = tuple((name, Range.of(text)) for name, text in ranges.items())
        name = self._id("map")
        yield
        around.append(Map(name, own, tuple(self._open)))
        self._open = around

    def tasklet(self, code: str, wcr: str = "", **memlets: str) -> None:
        """Adds code of jnp's functions such as `c = exp(a)`, with its containers.

        Args:
          code: assignments; the names that they assign to are outputs.
          wcr: what resolves conflicts of all outputs.
          **memlets: subsets by the names in `code`.
        """
        made = assigned(code)
        read = {name: text for name, text in memlets.items() if name not in made}
        written = {name: text for name, text in memlets.items() if name in made}
        self._add("tasklet", code, read, written, wcr=wcr)

    def reduce(self, op: str, source: str, target: str, *axes: int) -> None:
        """Adds a reduction of a subset along axes."""
        self._add("reduce", op, {"a": source}, {"b": target}, axes)

    def copy(self, source: str, target: str) -> None:
        """Adds a copy of a subset into one of as many elements."""
        self._add("copy", "", {"a": source}, {"b": target})

    def library(self, code: str, sources: Sequence[str], *targets: str) -> None:
        """Adds an einsum, or a function of a name that `interpret` is given."""
        inputs = {f"a{place}": text for place, text in enumerate(sources)}
        self._add("library", code, inputs, {f"b{n}": t for n, t in enumerate(targets)})

    def nested(
        self,
        graph: SDFG,
        times: int = 1,
        counter: str = "",
        symbols: Mapping[str, Index] | None = None,
        **arguments: str,
    ) -> None:
        """Adds a graph that runs several times; see `Nested`."""
        values = tuple((name, Affine.of(v)) for name, v in (symbols or {}).items())
        given = tuple(arguments.items())
        self._open.append(
            Nested(self._id("nested"), graph, given, times, counter, values)
        )

    def build(self, **ranges: str) -> SDFG:
        """Returns the graph.

        Args:
          **ranges: of symbols that are not any positive integer, such as counters.

        Raises:
          ConfigError: it is not valid; names state and edge.
        """
        states = (State(f"state.{n}", tuple(o)) for n, o in enumerate(self._states, 1))
        made = dataclasses.replace(self._graph, states=tuple(states))
        checks.check(made, [(n, Range.of(text)) for n, text in ranges.items()])
        return made

    def _id(self, kind: str) -> str:
        self._count[kind] = self._count.get(kind, 0) + 1
        return f"{kind}.{self._count[kind]}"

    def _add(
        self,
        kind: Any,
        code: str,
        inputs: Mapping[str, str],
        outputs: Mapping[str, str],
        axes: tuple[int, ...] = (),
        wcr: str = "",
    ) -> None:
        own = [
            tuple((name, self._memlet(text)) for name, text in each.items())
            for each in (inputs, outputs)
        ]
        written = tuple((name, memlet._replace(wcr=wcr)) for name, memlet in own[1])
        self._open.append(Code(self._id(kind), kind, code, own[0], written, axes))

    def _memlet(self, text: str) -> Memlet:
        name, subset = affine.read_subset(text)
        if name not in self._graph.arrays:
            hint = nearest(name, self._graph.arrays)
            raise ConfigError(f"{text}: there is no container {name!r}{hint}")
        return Memlet(
            name, self._graph.arrays[name].whole if subset is None else subset
        )
