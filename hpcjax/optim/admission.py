"""Which transforms may be cut, compressed or cached: told by what they do.

All three questions are put to one reading of the traced update, `optim.reading`. It is
an allow list: what is not known to work on elements, and meets what is cut, is refused.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.interpreters import partial_eval

from hpcjax.core import shards, trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.shards import Specs
from hpcjax.optim.comparing import Cut, Differing, compare, require_same
from hpcjax.optim.reading import Reader, Told, Unknown, is_number, meet

SPREAD = (
    "parameters that are spread over devices need an optimizer that works on elements "
    "and, by `cut`, on norms, such as sgd, adamw or lamb"
)
TILED = (
    "state in tiles needs an optimizer that works on elements, such as sgd or adamw, "
    "whose clip_norm is taken before"
)
COMPRESSED = (
    "compressed state needs an elementwise transform, which may use norms of what is "
    "kept, such as sgd, adamw or lamb"
)
BY_ROWS = (
    "a table in parts needs an optimizer by rows, such as SGD without momentum and "
    "weight decay, or row-wise Adagrad: got one that"
)
# Sizes of the dimensions of an array that are cut, each time that a transform is looked
# at. Of one array they differ, so that one dimension is not taken for another.
_SIZES = (11, 17, 23, 31, 41, 47, 59, 67), (97, 89, 83, 79, 73, 71, 61, 53)
_AXIS = "part"
# Where a cache and a table are told apart, this is a table.
_ROWS = 1_000_003
# What a transform may raise that cannot work on what it is given.
_FAULTS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError),
    *(RuntimeError, TypeError, ValueError),
)


class Traced(NamedTuple):
    """The program of an update, and the paths of its arguments and results."""

    program: Any
    inputs: list[str]
    outputs: list[str]


def check_cuttable(
    tx: optax.GradientTransformation,
    shapes: Any,
    stepped: Specs,
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Raises ConfigError unless a transform gives parts what it would give the whole.

    Its state must consist of numbers and of arrays like parameters: Adafactor's rows,
    Jorge's and Shampoo's factors are neither. And its update is traced, and followed
    from its arguments to its results, all branches of it. It may work on elements.
    What is summed up, or taken the maximum of, along a dimension that is cut is of a
    part until a collective along the axes that `cut` tells has made one of all parts.
    No result may depend on it, as those of `optax.clip_by_global_norm` do, and what
    else meets a dimension that is cut may move elements, and is refused.

    It is traced for parts of several sizes, for a device's part and for the whole. The
    programs must be the same but for shapes: a number that is another one was made of a
    size, as a rate by the fan-in is; `cut.global_shape` tells those of the whole.

    Whether what is done by collectives is right is not looked at.

    Args:
      tx: the transform; its rules are for the paths of `shapes`.
      shapes: of the parameters.
      stepped: how they are to be cut.
      sizes: of the mesh's axes; None looks at no device's own part.
    """
    flat = trees.flatten(shapes)
    cuts = {path: shards.list_cuts(stepped, path, x.ndim) for path, x in flat.items()}
    told = shards.CutAxes(
        {path: tuple((dim, _AXIS) for dim, _ in own) for path, own in cuts.items()},
        {path: leaf.shape for path, leaf in flat.items()},
    )
    forms = [_mark(shapes, cuts, own) for own in _SIZES] + [shapes]
    if sizes is not None:
        parts = {path: _part(x, cuts[path], sizes) for path, x in flat.items()}
        forms.append(trees.unflatten(shapes, parts))
    _check_parts(tx, forms, SPREAD, told)


def check_elements(tx: optax.GradientTransformation, shapes: Any) -> None:
    """Raises ConfigError unless a transform may be given any entries by themselves.

    As `check_cuttable`, with arrays cut along all dimensions and no axes told: a norm
    is then one of a part, and refused. Numbers are looked at as vectors, for a norm
    of several is one of a part, too.

    Args:
      tx: the transform; its rules are for the paths of `shapes`.
      shapes: of the parameters.
    """
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape or (2,), x.dtype), shapes
    )
    cuts = {
        path: tuple((dim, _AXIS) for dim in range(-x.ndim, 0))
        for path, x in trees.flatten(shapes).items()
    }
    forms = [_mark(shapes, cuts, own) for own in _SIZES] + [shapes]
    _check_parts(tx, forms, TILED, None)


def _check_parts(
    tx: optax.GradientTransformation,
    forms: Sequence[Any],
    needs: str,
    told: shards.CutAxes | None,
) -> None:
    """Raises ConfigError if a part's update is not that which the whole has there."""
    first, *others = (_trace_update(tx, each, needs, cut=told) for each in forms)
    reader = Reader(_compare([first, *others], needs))
    _require_whole(_follow(reader, first, [Told()] * len(first.inputs)), reader, needs)


def check_compressible(
    tx: optax.GradientTransformation, whole: Any, kept: Any, stacked: Mapping[str, int]
) -> None:
    """Raises ConfigError unless kept values get what masked training would give them.

    Its update must be, but for shapes, one program for whole arrays and for vectors of
    the values that are kept, of any size, and work on elements. Norms of all that is
    kept are those of the whole if what is pruned adds nothing. And what is pruned, a
    zero whose gradients are zeros, must stay one in every step: followed from the
    transform's first state on until nothing of it changes any more.

    Args:
      tx: the transform.
      whole: shapes of the parameters.
      kept: shapes of what is kept of them, `[*stack, ..., kept]` where pruned.
      stacked: how many of its dimensions stack layers, for each that is pruned.
    """
    programs = []
    for form in (kept, whole):
        flat = trees.flatten(form)
        # What is kept of one has other places than what is kept of another.
        cuts = {
            path: tuple((dim, path) for dim in range(n - flat[path].ndim, 0))
            for path, n in stacked.items()
        }
        forms = [_mark(form, cuts, own) for own in _SIZES] + [form]
        begun = [_trace_init(tx, each, COMPRESSED) for each in forms]
        stepped = [_trace_update(tx, each, COMPRESSED) for each in forms]
        cut = _compare(begun, COMPRESSED) | _compare(stepped, COMPRESSED)
        _follow_pruned(begun[0], stepped[0], Reader(cut, norms=True), stacked)
        programs.append((begun[0], stepped[0]))
    for vectors, matrices in zip(*programs, strict=True):
        try:
            require_same(vectors.program, matrices.program, None)
        except Differing as error:
            raise ConfigError(f"{COMPRESSED}: of matrices {error}") from error


def check_rows_apart(tx: optax.GradientTransformation, name: str = "table") -> None:
    """Raises ConfigError unless a transform leaves rows without a gradient alone.

    Such a transform may be given a part of a table's rows, which holds all that have a
    gradient, in place of the table. Its update is traced and followed: where a gradient
    is zero, an update must be zero and what is kept of the row must stay, whatever it
    is and whatever has been counted; and nothing may pass from row to row.
    `optim.sgd` has a buffer of momentum even where this is 0, which changes: plain SGD
    is `optax.sgd`.

    Args:
      tx: of averaged gradients; must not communicate.
      name: of the table among the parameters.
    """
    needs = BY_ROWS.removesuffix(": got one that")
    sizes = [*(rows for rows, *_ in _SIZES), _ROWS]
    forms = [{name: jax.ShapeDtypeStruct((rows, 4), "float32")} for rows in sizes]
    first, *others = (_trace_update(tx, each, needs, like=False) for each in forms)
    reader = Reader(_compare([first, *others], needs))
    given = [
        Told(at=np.float32(0) if path.startswith("grads/") else Unknown(at))
        for at, path in enumerate(first.inputs)
    ]
    found = _follow(reader, first, given)
    variables = dict(zip(first.outputs, first.program.jaxpr.outvars, strict=True))

    def stays(path: str) -> bool:
        if path.startswith("updates/"):
            return is_number(found[path].at, 0)
        of_rows = bool(reader.find_cut(variables[path]))
        return not of_rows or found[path].at == Unknown(first.inputs.index(path))

    mixed = [path for path, each in found.items() if each.of_part]
    moved = [path for path in found if path not in mixed and not stays(path)]
    if moved:
        raise ConfigError(f"{BY_ROWS} changes rows that have no gradient, {moved[:3]}")
    if mixed:
        raise ConfigError(f"{BY_ROWS} mixes rows, by {', '.join(reader.by)}")


def _follow_pruned(
    begun: Traced, stepped: Traced, reader: Reader, pruned: Mapping[str, int]
) -> None:
    """Raises ConfigError if pruned elements move, or count, in any step."""

    def begin(path: str) -> Told:
        kind, _, own = path.partition("/")
        zero = own in pruned and kind in ("params", "grads")
        return Told(at=np.float32(0) if zero else None)

    state = _follow(reader, begun, [begin(path) for path in begun.inputs])
    _require_whole(state, reader, COMPRESSED)
    while True:
        given = [state.get(path, begin(path)) for path in stepped.inputs]
        found = _follow(reader, stepped, given)
        # What is not the same after a step is not known: each time there are fewer.
        met = {path: Told(at=meet(state[path].at, found[path].at)) for path in state}
        if sum(each.at is None for each in met.values()) == sum(
            each.at is None for each in state.values()
        ):
            break
        state = met
    _require_whole(found, reader, COMPRESSED)
    moved = [path for path in pruned if not is_number(found[f"updates/{path}"].at, 0)]
    if moved:
        raise ConfigError(
            f"{COMPRESSED}: this one moves what is pruned, of {moved[:3]}"
        )


def _follow(reader: Reader, traced: Traced, given: Sequence[Told]) -> dict[str, Told]:
    """Returns what is told of a program's results, by their paths."""
    return dict(zip(traced.outputs, reader.follow(traced.program, given), strict=True))


def _require_whole(found: Mapping[str, Told], reader: Reader, needs: str) -> None:
    """Raises ConfigError if a result is of what one part alone has."""
    wrong = [path for path, each in found.items() if each.of_part]
    if wrong:
        raise ConfigError(
            f"{needs}: results of this one depend on sums, places or draws of what one "
            f"device has, {wrong[:3]}, by {', '.join(reader.by)}"
        )


def _compare(traced: Sequence[Traced], needs: str) -> Cut:
    """Returns which dimensions are cut; raises ConfigError if a size is used."""
    try:
        return compare([each.program for each in traced])
    except Differing as error:
        raise ConfigError(
            f"{needs}: this one works by the size of what a device has: {error}"
        ) from error


def _mark(shapes: Any, cuts: Mapping[str, shards.Cuts], sizes: Sequence[int]) -> Any:
    """Returns shapes whose cut dimensions have sizes that tell how an array is cut."""
    kinds = list(dict.fromkeys(cuts.values()))

    def mark(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
        shape, own = list(leaf.shape), cuts.get(path, ())
        for dim, _ in own:
            shape[dim] = sizes[leaf.ndim + dim] + 100 * kinds.index(own)
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    flat = trees.flatten(shapes)
    return trees.unflatten(shapes, {path: mark(path, x) for path, x in flat.items()})


def _part(leaf: Any, cuts: shards.Cuts, sizes: Mapping[str, int]) -> Any:
    """Returns the shape of a device's part."""
    shape = list(leaf.shape)
    for dim, axis in cuts:
        shape[dim] //= sizes.get(axis, 1)
    return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)


def _trace_init(tx: optax.GradientTransformation, params: Any, needs: str) -> Traced:
    """Returns the program of a transform's first state."""

    def init(given: Any) -> Any:
        return {"state": tx.init(given["params"])}

    return _trace(init, {"params": params}, needs)


def _trace_update(
    tx: optax.GradientTransformation,
    params: Any,
    needs: str,
    *,
    cut: shards.CutAxes | None = None,
    like: bool = True,
) -> Traced:
    """Returns the program of an update.

    Args:
      tx: the transform.
      params: shapes.
      needs: what it must be, for messages.
      cut: as the update gets it.
      like: whether its state must consist of numbers and of arrays like parameters.
    """
    wide = optax.with_extra_args_support(tx)
    told = {} if cut is None else {"cut": cut}

    def update(given: Any) -> Any:
        updates, state = wide.update(
            given["grads"], given["state"], given["params"], **told, **given["extra"]
        )
        found = {"updates": updates, "state": state}
        like = {"updates": given["params"], "state": given["state"]}
        if jax.tree.structure(like) != jax.tree.structure(found):
            raise TypeError("it returns other trees than those that it was given")
        return found

    state = _look(needs, jax.eval_shape, tx.init, params)
    if like:
        _look(needs, _check_state, tx, state, params, needs)
    numbers = {"loss_terms": "float32", "step": "int32", "value": "float32"}
    extra = {name: jax.ShapeDtypeStruct((), dtype) for name, dtype in numbers.items()}
    given = {"grads": params, "state": state, "params": params, "extra": extra}
    return _trace(update, given, needs)


def _trace(function: Any, given: Any, needs: str) -> Traced:
    make = jax.make_jaxpr(function, axis_env=[(_AXIS, 2)], return_shape=True)
    traced, results = _look(needs, make, given)
    outputs = [True] * len(traced.jaxpr.outvars)
    needed, _ = partial_eval.dce_jaxpr(traced.jaxpr, outputs, instantiate=True)
    program = traced.replace(jaxpr=needed)
    return Traced(program, list(trees.flatten(given)), list(trees.flatten(results)))


def _look(needs: str, function: Any, *args: Any) -> Any:
    """Returns what a function of the transform gives for shapes."""
    try:
        return function(*args)
    except ConfigError:
        raise
    except _FAULTS as error:
        raise ConfigError(f"{needs}: this one cannot be looked at: {error}") from error


def _check_state(
    tx: optax.GradientTransformation, state: Any, params: Any, needs: str
) -> None:
    """Raises ConfigError if the state is of more than numbers and such arrays."""

    def fits(leaf: Any, like: Any) -> bool:
        return getattr(leaf, "shape", like.shape) == like.shape

    def is_single(leaf: Any) -> bool:
        # A key would draw for each part what another one draws for the whole.
        drawn = jnp.issubdtype(getattr(leaf, "dtype", jnp.float32), jax.dtypes.prng_key)
        return math.prod(getattr(leaf, "shape", (0,))) == 1 and not drawn

    good = shards.map_state(fits, tx, state, params, other=is_single)
    wrong = [path for path, fitting in trees.flatten(good).items() if not fitting]
    if wrong:
        raise ConfigError(
            f"{needs}: the state of this one holds what is neither a number nor like a "
            f"parameter, {wrong[:3]}"
        )
