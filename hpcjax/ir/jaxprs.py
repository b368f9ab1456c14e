"""Reads jaxprs; the list of a function's operators. Nothing is compiled or run."""

import math
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import jax
from jax.extend import core

from hpcjax.core.errors import UnsupportedOp
from hpcjax.ir.graph import Dataflow, Kind, Operator, Tensor

# Primitives that run one inner program once.
CALLS = frozenset(
    {
        *("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
    }
)
# Primitives that only rename elements: their results are the tensors that they take.
_RENAMES = frozenset(
    {
        *("reshape", "squeeze", "expand_dims", "broadcast_in_dim"),
        *("name", "pvary", "optimization_barrier"),
    }
)
_NAMED: Mapping[Kind, tuple[str, ...]] = {
    "contraction": (
        *("dot_general", "conv_general_dilated"),
        *("bcoo_dot_general", "bcoo_dot_general_sampled"),
    ),
    "movement": (
        *("transpose", "slice", "dynamic_slice", "dynamic_update_slice", "gather"),
        *("scatter", "scatter-add", "scatter_add", "scatter-max", "scatter-min"),
        *("scatter-mul", "concatenate", "stack", "unstack", "pad", "rev"),
        *("copy_p", "device_put", "split"),
    ),
    "statistical": ("sort", "top_k"),
}
_KINDS = {name: kind for kind, names in _NAMED.items() for name in names}
_REDUCTIONS = ("reduce_", "arg", "cum")
# Maps that compute nothing, and so can be part of a kernel at no cost.
_FREE = ("broadcast_in_dim", "convert_element_type", "iota", "select_n", "copy")


def dataflow(fn: Callable[..., Any], *args: Any) -> Dataflow:
    """Returns the operators of a function, those that its results depend on.

    Inner functions, `custom_vjp` rules and rematerialised parts are inlined, the body
    of a scan once, with its number of executions, and of a branch the one with the most
    operations and elements that are gathered or scattered. What only reshapes is no
    operator.
    Constants within an operator are not counted.

    Args:
      fn: of arrays; `jax.vjp` of it for gradients.
      *args: arrays, or their shapes and dtypes.

    Raises:
      UnsupportedOp: a loop whose length depends on values, or another primitive with
        an inner program; it is named.

    Examples:
      >>> x = jax.ShapeDtypeStruct((8, 16), "float32")
      >>> flow = dataflow(lambda x: jax.nn.relu(x @ x.T).sum(), x)
      >>> [each.name for each in flow.operators]
      ['transpose 1', 'dot_general 2', 'max 3', 'reduce_sum 4']
      >>> flow.moved("dot_general 2")
      Moved(flops=2048, read=256, written=64)
    """
    return listed(jax.make_jaxpr(fn)(*args).jaxpr)


def listed(jaxpr: Any) -> Dataflow:
    """Returns the operators of a jaxpr."""
    reader = _Lister()
    outputs = frozenset(reader.read(jaxpr, [*map(reader.new, jaxpr.invars)]))
    operators = _needed(reader.operators, outputs)
    named = {t for each in operators for t in (*each.inputs, *each.outputs)} | outputs
    return Dataflow(
        operators=operators,
        tensors={name: t for name, t in reader.tensors.items() if name in named},
        outputs=outputs,
    )


Value = TypeVar("Value")


class Reader(Generic[Value]):
    """Follows nested jaxprs; what stands for a variable is for `equation` to say."""

    def equation(self, eqn: Any, given: list[Value]) -> list[Value]:
        """Adds what an equation does, and returns what its results are."""
        raise NotImplementedError

    def literal(self, variable: Any) -> Value:
        """Returns what a number in a program is."""
        raise NotImplementedError

    def constant(self, variable: Any) -> Value:
        """Returns what an array that a program holds is."""
        raise NotImplementedError

    def call(self, eqn: Any, given: list[Value]) -> list[Value]:
        """Adds what a call runs."""
        return self.read(_inner_program(eqn), given)

    def read(self, jaxpr: Any, inputs: Iterable[Value]) -> list[Value]:
        """Adds a jaxpr's equations, of calls what they run; returns its results."""
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        known |= {variable: self.constant(variable) for variable in jaxpr.constvars}

        def get(variable: Any) -> Value:
            literal = isinstance(variable, core.Literal)
            return self.literal(variable) if literal else known[variable]

        for eqn in jaxpr.eqns:
            given = [get(variable) for variable in eqn.invars]
            if eqn.primitive.name in CALLS:
                made = self.call(eqn, given)
            else:
                made = self.equation(eqn, given)
            known |= dict(zip(eqn.outvars, made, strict=True))
        return [get(variable) for variable in jaxpr.outvars]


class _Lister(Reader[str]):
    """Collects operators, and tensors, whose names stand for variables."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []
        self.tensors: dict[str, Tensor] = {}
        self.times = 1

    def new(self, variable: Any) -> str:
        """Adds a tensor of a variable's shape and returns its name."""
        name = f"tensor {len(self.tensors) + 1}"
        self.tensors[name] = Tensor(tuple(getattr(variable.aval, "shape", ())))
        return name

    literal = constant = new

    def equation(self, eqn: Any, given: list[str]) -> list[str]:
        """Adds an operator, a scan's body or a branch; what only renames is none."""
        if eqn.primitive.name == "scan":
            return self._scan(eqn, given)
        if eqn.primitive.name == "cond":
            return self._cond(eqn, given)
        if _renames(eqn):
            return given
        results = [self.new(variable) for variable in eqn.outvars]
        pairs = zip(eqn.invars, given, strict=True)
        read = [name for v, name in pairs if not isinstance(v, core.Literal)]
        self._add(eqn, read, results)
        return results

    def _scan(self, eqn: Any, inputs: list[str]) -> list[str]:
        """Adds the body of a scan; its slices and stacks are views."""
        params, inner, outer = eqn.params, eqn.params["jaxpr"].jaxpr, self.times
        self.times *= params["length"]
        for place in range(params["num_consts"] + params["num_carry"], len(inputs)):
            whole, inputs[place] = inputs[place], self.new(inner.invars[place])
            self._view("scan_slice", [whole], [inputs[place]])
        parts = self.read(inner, inputs)
        # One view of all results: each may depend on what all iterations carry.
        results = [self.new(variable) for variable in eqn.outvars]
        self._view("scan_results", parts, results)
        self.times = outer
        return results

    def _cond(self, eqn: Any, inputs: list[str]) -> list[str]:
        """Adds the branch with the most to do, whichever is taken."""
        found = []
        for branch in eqn.params["branches"]:
            reader = _Lister()
            reader.read(branch.jaxpr, [*map(reader.new, branch.jaxpr.invars)])
            every = (each.times * reader.effort(each) for each in reader.operators)
            found.append(sum(every))
        dearest = eqn.params["branches"][found.index(max(found))]
        parts = self.read(dearest.jaxpr, inputs[1:])
        # One view of all results: what is taken depends on the choice.
        results = [self.new(variable) for variable in eqn.outvars]
        self._view("cond_results", [inputs[0], *parts], results)
        return results

    def effort(self, own: Operator) -> int:
        """Returns operations, and elements that are gathered or scattered."""
        if own.name.startswith("scatter"):
            return self.tensors[own.inputs[-1]].words
        return math.prod(own.space) if own.name.startswith("gather") else own.flops

    def _view(self, name: str, inputs: list[str], outputs: list[str]) -> None:
        name = f"{name} {len(self.operators) + 1}"
        self.operators.append(
            Operator(name, "view", tuple(inputs), tuple(outputs), times=self.times)
        )

    def _add(self, eqn: Any, inputs: list[str], outputs: list[str]) -> None:
        primitive = eqn.primitive.name
        reduces = primitive.startswith(_REDUCTIONS)
        kind: Kind = _KINDS.get(primitive, "statistical" if reduces else "elementwise")
        known = primitive in _KINDS or reduces
        if not known and inner_programs(eqn):
            raise UnsupportedOp(
                f"the work of {primitive!r} is not known before it runs; a dataflow "
                f"graph takes scan, cond, and calls: {sorted(CALLS)}"
            )
        whole = eqn.invars if kind == "statistical" else eqn.outvars
        shape = tuple(getattr(whole[0].aval, "shape", ()))
        axes = eqn.params.get("axes", (eqn.params.get("axis"),)) if reduces else ()
        axes = (eqn.params["dimension"],) if primitive == "sort" else axes
        self.operators.append(
            Operator(
                name=f"{primitive} {len(self.operators) + 1}",
                kind=kind,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                flops=_flops(eqn, kind, shape),
                space=shape,
                reduced=tuple(axis for axis in axes if axis is not None),
                einsum=read_einsum(eqn) if primitive == "dot_general" else "",
                times=self.times,
            )
        )


def _renames(eqn: Any) -> bool:
    """Whether the results are the arguments in other shapes of as many elements."""
    if eqn.primitive.name not in _RENAMES or len(eqn.invars) != len(eqn.outvars):
        return False
    sizes = [
        [math.prod(v.aval.shape) for v in own] for own in (eqn.invars, eqn.outvars)
    ]
    literal = any(isinstance(variable, core.Literal) for variable in eqn.invars)
    return sizes[0] == sizes[1] and not literal


def _inner_program(eqn: Any) -> Any:
    """Returns the program that a call runs."""
    program = eqn.params.get("call_jaxpr", eqn.params.get("jaxpr"))
    return program.jaxpr if isinstance(program, core.ClosedJaxpr) else program


def inner_programs(eqn: Any) -> list[Any]:
    """Returns the inner programs of a primitive."""
    values = (
        value
        for param in eqn.params.values()
        for value in (param if isinstance(param, tuple | list) else (param,))
    )
    return [v for v in values if isinstance(v, core.ClosedJaxpr | core.Jaxpr)]


def _flops(eqn: Any, kind: Kind, shape: tuple[int, ...]) -> int:
    """Returns operations: two for a multiplication and addition, one for others."""
    if kind in ("movement", "view") or eqn.primitive.name in _FREE:
        return 0
    if eqn.primitive.name == "bcoo_dot_general":
        (_, summed), (_, batch) = eqn.params["dimension_numbers"]
        entries, other = eqn.invars[0].aval.size, eqn.invars[2].aval.shape
        free = [n for axis, n in enumerate(other) if axis not in (*summed, *batch)]
        return 2 * entries * math.prod(free)
    if eqn.primitive.name in ("dot_general", "bcoo_dot_general_sampled"):
        (summed, _), _ = eqn.params["dimension_numbers"]
        sizes = eqn.invars[0].aval.shape
        return 2 * math.prod(shape) * math.prod(sizes[axis] for axis in summed)
    if eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        outputs = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(shape) * math.prod(kernel) // outputs
    return math.prod(shape)


def read_einsum(eqn: Any) -> str:
    """Returns what a `dot_general` computes, with letters in the order of use."""
    (sums, other_sums), (batch, other_batch) = eqn.params["dimension_numbers"]
    left, right = (v.aval.ndim for v in eqn.invars)
    first = string.ascii_letters[:left]
    fresh = iter(string.ascii_letters[left:])
    shared = dict(zip(other_sums + other_batch, sums + batch, strict=True))
    second = "".join(
        first[shared[axis]] if axis in shared else next(fresh) for axis in range(right)
    )
    batched = "".join(first[axis] for axis in batch)
    free = "".join(axis for axis in first if axis not in second)
    other = "".join(axis for axis in second if axis not in first)
    return f"{first},{second}->{batched}{free}{other}"


def _needed(operators: list[Operator], outputs: Iterable[str]) -> tuple[Operator, ...]:
    """Returns the operators that results depend on, in their order."""
    live, kept = set(outputs), []
    for each in reversed(operators):
        if live & set(each.outputs):
            live |= set(each.inputs)
            kept.append(each)
    return tuple(reversed(kept))
