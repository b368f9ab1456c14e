"""Reads JAX functions as graphs of data movement; nothing is compiled or run.

Slices, pads, concatenations, transposes, reshapes and broadcasts are subsets of what
reads or writes them. What has no subsets that are known before it runs is opaque: its
primitive runs as it is, on whole arrays.
"""

import logging
import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core

from hpcjax.core.errors import ConfigError
from hpcjax.ir._parts import PARTS
from hpcjax.ir.affine import Affine, Range
from hpcjax.ir.jaxprs import Reader, read_einsum
from hpcjax.ir.sdfg import SDFG, Array, Code, Map, Memlet, Nested, Node, State
from hpcjax.ir.traced import Program, plain
from hpcjax.ir.views import View, axis, groups

log = logging.getLogger(__name__)

# Code of elementwise primitives, of operands in the order of the alphabet.
_CODE: Mapping[str, str] = {
    **{"add": "a + b", "add_any": "a + b", "sub": "a - b", "mul": "a * b"},
    **{"div": "a / b", "max": "maximum(a, b)", "min": "minimum(a, b)", "neg": "-a"},
    **{"pow": "power(a, b)", "rsqrt": "1 / sqrt(a)", "logistic": "1 / (1 + exp(-a))"},
    **{"eq": "a == b", "ne": "a != b", "lt": "a < b", "le": "a <= b"},
    **{"gt": "a > b", "ge": "a >= b", "select_n": "where(a, c, b)", "sign": "sign(a)"},
    **{"clamp": "minimum(maximum(b, a), c)", "convert_element_type": "a", "copy": "a"},
    **{"is_finite": "isfinite(a)", "atan2": "arctan2(a, b)", "rem": "fmod(a, b)"},
    **{"abs": "absolute(a)", "round": "rint(a)", "square": "a * a", "copy_p": "a"},
    **{"shift_left": "left_shift(a, b)", "shift_right_arithmetic": "right_shift(a, b)"},
    **{"shift_right_logical": "right_shift(a, b)"},
    **{"erf": "erf(a)", "erfc": "erfc(a)", "erf_inv": "erfinv(a)"},
    **{"lgamma": "gammaln(a)", "digamma": "digamma(a)"},
    **{f"a{name}": f"arc{name}(a)" for name in ("sin", "cos", "tan", "sinh", "cosh")},
    **{
        name: f"{name}(a)"
        for name in (
            *("exp", "exp2", "expm1", "log", "log1p", "sqrt", "cbrt", "floor", "ceil"),
            *("sin", "cos", "tan", "sinh", "cosh", "tanh"),
        )
    },
}
_LOGIC, _SHIFT = ("and", "or", "xor"), "shift_right_logical"
_REDUCERS: Mapping[str, str] = {
    **{"reduce_sum": "add", "reduce_prod": "multiply", "reduce_max": "maximum"},
    **{"reduce_min": "minimum", "reduce_and": "minimum", "reduce_or": "maximum"},
}
_VIEWS = (
    *("slice", "transpose", "squeeze", "expand_dims", "reshape", "name"),
    *("broadcast_in_dim", "pvary", "optimization_barrier", "stop_gradient"),
)
# Known functions of whole arrays, which are not opaque.
_LIBRARY = ("conv_general_dilated", "dot_general")


def from_jax(fn: Callable[..., Any], *args: Any) -> Program:
    """Returns the graph of a function, with what it needs to run again.

    Args:
      fn: of trees of arrays.
      *args: arrays, or their shapes and dtypes.

    Raises:
      ConfigError: arguments or results without arrays, or donated arguments.

    Examples:
      >>> x = jax.ShapeDtypeStruct((4, 8), "float32")
      >>> program = from_jax(lambda x: jax.numpy.exp(x.T[1:]), x)
      >>> print(program.graph.states[0].nodes[0].body[0].inputs[0][1])
      x0[i1, i0 + 1]
      >>> sum(edge.words for edge in program.graph.movement())
      56
    """
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    given, tree = jax.tree.flatten(shape)
    if not closed.jaxpr.invars or not given:
        raise ConfigError("the function must take and return arrays")
    reader = _Reader("x")
    inputs = [reader.new(v.aval, outside=True) for v in closed.jaxpr.invars]
    for variable in closed.jaxpr.constvars:
        reader.constants[variable] = reader.new(variable.aval, outside=True)
    results = reader.read(closed.jaxpr, inputs)
    avals = (variable.aval for variable in closed.jaxpr.outvars)
    outputs = [reader.output(v, own) for v, own in zip(results, avals, strict=True)]
    return Program(
        graph=reader.graph(getattr(fn, "__name__", "function")),
        functions=reader.functions,
        inputs=tuple(each.data for each in inputs),
        constants={
            each.data: plain(value)
            for each, value in zip(
                reader.constants.values(), closed.consts, strict=True
            )
        },
        outputs=tuple(outputs),
        trees=(jax.tree.structure(args), tree),
        opaque=frozenset(reader.opaque),
        source=closed.jaxpr,
    )


def _keys(aval: Any) -> Any:
    """Returns the implementation of random keys; None for other arrays."""
    dtype: Any = getattr(aval, "dtype", np.float32)
    return dtype._impl if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else None


class _Reader(Reader[View]):
    """Collects the containers and nodes of a graph, and functions for all graphs."""

    def __init__(self, prefix: str, outer: "_Reader | None" = None) -> None:
        self.prefix = prefix
        self.arrays: dict[str, Array] = {}
        self.nodes: list[Node] = []
        self.constants: dict[Any, View] = {}
        self.functions: dict[str, Callable[..., Any]] = outer.functions if outer else {}
        self.opaque: set[str] = outer.opaque if outer else set()
        self.counts: dict[str, int] = outer.counts if outer else {}

    def graph(self, name: str, *symbols: str) -> SDFG:
        """Returns what was collected."""
        return SDFG(name, self.arrays, (State("state.1", tuple(self.nodes)),), symbols)

    def number(self, kind: str) -> int:
        """Returns how many of a kind there were before."""
        self.counts[kind] = self.counts.get(kind, -1) + 1
        return self.counts[kind]

    def new(self, aval: Any, *, outside: bool = False) -> View:
        """Adds a container for an array; for random keys, of their data."""
        if _keys(aval):
            like = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
            aval = jax.eval_shape(jax.random.key_data, like)
        return self.container(aval.shape, np.dtype(aval.dtype).name, outside=outside)

    def container(
        self, shape: Sequence[int], dtype: str, *, outside: bool = False
    ) -> View:
        """Adds a container."""
        prefix = self.prefix if outside else "t"
        name = f"{prefix}{self.number(prefix)}"
        self.arrays[name] = Array(tuple(map(Affine.of, shape)), dtype, not outside)
        return View.whole(name, shape)

    def add(
        self, kind: Any, code: str, inputs: Any, outputs: Any, axes: Any = ()
    ) -> None:
        """Adds a node that is in no map, of memlets."""
        names = [
            tuple((f"{letter}{n}", memlet) for n, memlet in enumerate(own))
            for letter, own in (("a", inputs), ("b", outputs))
        ]
        node = f"{kind}.{self.number(kind) + 1}"
        self.nodes.append(Code(node, kind, code, names[0], names[1], tuple(axes)))

    def tasklet(self, code: str, views: Sequence[View], target: View) -> None:
        """Adds a map over a target's elements, of code of a, b, c, ..."""
        if 0 in target.shape:
            return
        inputs: dict[Memlet, str] = {}
        for name, view in zip(string.ascii_letters, views, strict=False):
            text = f"({view.value})" if view.value[:1] == "-" else view.value
            if view.data:
                text = inputs.setdefault(view.memlet, f"v{name}")
            code = re.sub(rf"\b{name}\b", text, code)
        node = Code(
            f"tasklet.{self.number('tasklet') + 1}",
            "tasklet",
            f"o = {code}",
            tuple((name, memlet) for memlet, name in inputs.items()),
            (("o", target.memlet),),
        )
        ranges = tuple(
            (axis(place), Range(Affine(), (Affine((), size - 1),)))
            for place, size in enumerate(target.shape)
        )
        made = Map(f"map.{self.number('map') + 1}", ranges, (node,)) if ranges else node
        self.nodes.append(made)

    def stored(self, view: View, dtype: str) -> View:
        """Returns a new container's view that holds an array."""
        made = self.container(view.shape, dtype)
        self.tasklet("a", [view], made)
        return made

    def boxed(self, view: View, dtype: Any, *, whole: bool = False) -> tuple[Any, View]:
        """Returns an array's box, and its view, of a new container if it must be.

        Args:
          view: of the array.
          dtype: of its elements.
          whole: whether the box must have its axes, all and in their order.
        """
        found = view.box() if view.data else None
        if not found or (whole and found[1] != (*range(len(view.shape)),)):
            view = self.stored(view, np.dtype(dtype).name)
            found = view.box()
        return found, view

    def container_of(self, view: View, dtype: Any) -> str:
        """Returns the container that is an array."""
        if view.data and view == View.whole(view.data, self.shape(view.data)):
            return view.data
        return self.stored(view, np.dtype(dtype).name).data

    def shape(self, data: str) -> tuple[int, ...]:
        """Returns the shape of a container."""
        return tuple(size.constant for size in self.arrays[data].shape)

    def output(self, view: View, aval: Any) -> str:
        """Returns a container that is seen from outside and holds an array."""
        made = self.container_of(view, self.new_dtype(aval))
        if not self.arrays[made].transient:
            made = self.stored(view, self.arrays[made].dtype).data
        self.arrays[made] = self.arrays[made]._replace(transient=False)
        return made

    def new_dtype(self, aval: Any) -> Any:
        """Returns what a container's elements are for an array."""
        return np.uint32 if _keys(aval) else aval.dtype

    def literal(self, variable: Any) -> View:
        """Returns a number as it is in code."""
        return View("", (), (), repr(np.asarray(variable.val).item()))

    def constant(self, variable: Any) -> View:
        """Returns the container of an array that a program holds."""
        if variable not in self.constants:
            raise ConfigError("an inner program holds arrays: pass them to it")
        return self.constants[variable]

    def call(self, eqn: Any, given: list[View]) -> list[View]:
        """Adds what a call runs."""
        if any(eqn.params.get("donated_invars", ())):
            raise ConfigError("donated arguments are written in place: not read")
        return super().call(eqn, given)

    def equation(self, eqn: Any, given: list[View]) -> list[View]:
        """Adds what an equation does, and returns what its results are."""
        name, every = eqn.primitive.name, (*eqn.invars, *eqn.outvars)
        keys = any(_keys(v.aval) for v in every)
        empty = any(0 in getattr(v.aval, "shape", ()) for v in every)
        whole = name in ("reshape", "dot_general", "scan", *_REDUCERS)
        # An einsum's code has no place for how exact its products are.
        exact = name == "dot_general" and _demands(eqn.params)
        made = None
        if not (keys or exact or (empty and whole)):
            made = self.known(name, eqn, given)
        return made if made is not None else self.library(eqn, given)

    def known(self, name: str, eqn: Any, views: list[View]) -> list[View] | None:
        """Returns the results of a primitive whose subsets are known."""
        if name in _VIEWS:
            return self.view(name, eqn, views)
        if name in PARTS:
            return PARTS[name](self, eqn, views)
        if name in _REDUCERS:
            return [self.reduce(eqn, views[0])]
        code = _code(eqn)
        if code is None:
            return None
        made = self.new(eqn.outvars[0].aval)
        axes = range(len(made.shape))
        self.tasklet(
            code,
            [
                view.broadcast(made.shape, axes) if view.shape else view
                for view in views
            ],
            made,
        )
        return [made]

    def view(self, name: str, eqn: Any, views: list[View]) -> list[View]:
        """Returns results that are arguments, indexed in another way."""
        (view, *_), params = views, eqn.params
        shape = tuple(eqn.outvars[0].aval.shape)
        if name == "slice":
            return [view.slice(params["start_indices"], shape, params["strides"] or ())]
        if name == "transpose":
            return [view.transpose(params["permutation"])]
        if name == "broadcast_in_dim":
            return [view.broadcast(shape, params["broadcast_dimensions"])]
        if name not in ("squeeze", "expand_dims", "reshape"):
            return views
        if params.get("dimensions") and name == "reshape":
            view = view.transpose(params["dimensions"])
        return [view.reshape(shape) or self.merged(view, shape, eqn.invars[0].aval)]

    def merged(self, view: View, shape: Sequence[int], aval: Any) -> View:
        """Returns a reshape whose indices are affine only where it is written."""
        parts = list(groups(view.shape, shape))
        sizes = [math.prod(view.shape[k] for k in old) for old, _ in parts]
        made = self.container(sizes, np.dtype(aval.dtype).name)
        target = made.reshape(view.shape)
        assert target is not None
        self.tasklet("a", [view], target)
        split = made.reshape(shape)
        assert split is not None
        return split

    def reduce(self, eqn: Any, view: View) -> View:
        """Adds a reduction."""
        (subset, places), view = self.boxed(view, eqn.invars[0].aval.dtype)
        gone = [
            n
            for n, place in enumerate(places)
            if place < 0 or place in eqn.params["axes"]
        ]
        kept = [place for n, place in enumerate(places) if n not in gone]
        shape = [view.shape[place] for place in kept]
        made = self.container(shape, np.dtype(eqn.outvars[0].aval.dtype).name)
        source = Memlet(view.data, subset)
        target = Memlet(made.data, self.arrays[made.data].whole)
        self.add("reduce", _REDUCERS[eqn.primitive.name], [source], [target], gone)
        return made.transpose([kept.index(place) for place in sorted(kept)])

    def contract(self, eqn: Any, views: list[View]) -> View:
        """Adds an einsum."""
        operands, _, result = read_einsum(eqn).partition("->")
        free = iter(sorted({*string.ascii_letters} - {*operands}))
        codes, memlets = [], []
        for letters, view, v in zip(
            operands.split(","), views, eqn.invars, strict=True
        ):
            (subset, places), own = self.boxed(view, v.aval.dtype)
            codes.append("".join(letters[p] if p >= 0 else next(free) for p in places))
            memlets.append(Memlet(own.data, subset))
        made = self.new(eqn.outvars[0].aval)
        target = Memlet(made.data, self.arrays[made.data].whole)
        self.add("library", f"{','.join(codes)}->{result}", memlets, [target])
        return made

    def library(self, eqn: Any, views: list[View]) -> list[View]:
        """Adds a primitive that runs as it is."""
        memlets, read = [], {}
        for view, variable in zip(views, eqn.invars, strict=True):
            if isinstance(variable, core.Literal) or variable in read:
                continue
            read[variable] = None
            (subset, _), own = self.boxed(
                view, self.new_dtype(variable.aval), whole=True
            )
            memlets.append(Memlet(own.data, subset))
        made = [self.new(variable.aval) for variable in eqn.outvars]
        name = eqn.primitive.name
        code = f"{name} {self.number(name) + 1}"
        self.functions[code] = _runner(eqn, [*read])
        if name not in _LIBRARY:
            self.opaque.add(code)
            log.info("%s has no subsets that are known: it is opaque", code)
        targets = [Memlet(own.data, self.arrays[own.data].whole) for own in made]
        self.add("library", code, memlets, targets)
        return made

    def scan(self, eqn: Any, views: list[View]) -> list[View]:
        """Adds a graph that runs several times, with what it carries in place."""
        params, inner = eqn.params, _Reader("s", self)
        closed, length = params["jaxpr"], params["length"]
        counter = f"n{self.number('n')}"
        step = Affine(((counter, 1),))
        turn = Affine((), length - 1) - step if params["reverse"] else step
        first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
        arguments: dict[str, str] = {}

        def enter(outer: str) -> View:
            array = self.arrays[outer]
            made = inner.container(self.shape(outer), array.dtype, outside=True)
            arguments[made.data] = outer
            return made

        read: dict[str, View] = {}
        given, carried, carries = [], [], []
        for place, (view, v) in enumerate(zip(views, eqn.invars, strict=True)):
            if first <= place < last:
                carries.append(self.stored(view, np.dtype(v.aval.dtype).name))
                carried.append(enter(carries[-1].data))
                given.append(carried[-1])
                continue
            outer = self.container_of(view, v.aval.dtype)
            own = read[outer] = read.get(outer) or enter(outer)
            given.append(own if place < first else own.pick(0, turn))
        results = inner.read(closed.jaxpr, given)
        stacked = [self.new(v.aval) for v in eqn.outvars[len(carries) :]]
        for view, made in zip(results[len(carries) :], stacked, strict=True):
            inner.tasklet("a", [view], enter(made.data).pick(0, turn))
        kinds = [self.arrays[made.data].dtype for made in carries]
        news = [inner.stored(v, d) for v, d in zip(results, kinds, strict=False)]
        for new, place in zip(news, carried, strict=True):
            whole = (inner.arrays[place.data].whole,)
            inner.add(
                "copy", "", [Memlet(new.data, *whole)], [Memlet(place.data, *whole)]
            )
        node = f"nested.{self.number('nested') + 1}"
        graph = inner.graph(node, counter)
        self.nodes.append(
            Nested(node, graph, tuple(arguments.items()), length, counter)
        )
        return [*carries, *stacked]


def _demands(params: Mapping[str, Any]) -> bool:
    """Whether a product must be more exact, or lie elsewhere, than by default."""
    asked = (params["precision"], params.get("out_sharding"))
    free = (None, lax.Precision.DEFAULT, (lax.Precision.DEFAULT,) * 2)
    return any(each not in free for each in asked)


def _code(eqn: Any) -> str | None:
    """Returns the code of an elementwise primitive; None if it is not known."""
    name, params = eqn.primitive.name, eqn.params
    kinds = {_kind(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)}
    chosen = len(eqn.invars) == 3 and np.dtype(eqn.invars[0].aval.dtype).kind == "b"
    refused = {
        "div": kinds != {"f"},
        "integer_pow": kinds != {"f"} and params.get("y", 0) < 0,
        _SHIFT: kinds != {"u"},
        "select_n": not chosen,
        "round": params.get("rounding_method") != lax.RoundingMethod.TO_NEAREST_EVEN,
    }
    if "c" in kinds or refused.get(name):
        return None
    if name == "integer_pow":
        return "a * a" if params["y"] == 2 else f"power(a, {params['y']})"
    if name == "not":
        return "logical_not(a)" if kinds == {"b"} else "invert(a)"
    if name in _LOGIC:
        return f"{'logical' if kinds == {'b'} else 'bitwise'}_{name}(a, b)"
    return _CODE.get(name)


def _kind(dtype: Any) -> str:
    """Returns numpy's letter, which narrow floating points do not have there."""
    real = jax.dtypes.issubdtype(dtype, np.floating)
    return "f" if real else np.dtype(dtype).kind


def _runner(eqn: Any, read: Sequence[Any]) -> Callable[..., tuple[Any, ...]]:
    """Returns what runs a primitive on the arrays of the variables that it reads."""

    def run(*arrays: Any) -> tuple[Any, ...]:
        known = {}
        for array, variable in zip(arrays, read, strict=True):
            known[variable] = jax.numpy.asarray(array)
            if kind := _keys(variable.aval):
                known[variable] = jax.random.wrap_key_data(array, impl=kind.name)
        given = (v.val if isinstance(v, core.Literal) else known[v] for v in eqn.invars)
        params = eqn.primitive.get_bind_params(eqn.params)
        made = eqn.primitive.bind(*given, **params)
        return tuple(map(plain, made if eqn.primitive.multiple_results else [made]))

    return run
