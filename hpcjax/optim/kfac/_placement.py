"""Where K-FAC decomposes and preconditions: on every device, or shared over a grid.

Both placements have the methods `init`, `valid`, `refresh` and `precondition`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax.collectives import broadcast
from hpcjax.core import per_device
from hpcjax.core.errors import ConfigError
from hpcjax.core.per_device import PerDevice
from hpcjax.core.varying import assume_equal, vary
from hpcjax.optim import matrices as batching
from hpcjax.optim.kfac import _decomposition as curvature
from hpcjax.optim.kfac._blocks import Plan, Unit
from hpcjax.optim.kfac._decomposition import SIDES, Items
from hpcjax.optim.kfac._distribution import (
    AXES,
    RECEIVER_AXIS,
    WORKER_AXIS,
    Distribution,
    Layout,
    make_layout,
)
from hpcjax.optim.kfac.options import KfacOptions

Matrices = Mapping[Unit, Float[Array, "a g"]]
Factors = Mapping[str, Mapping[str, jax.Array]]
MADE = "made"


def _decompose(
    options: KfacOptions,
    factors: Factors,
    damping: Any,
    owned: Mapping[Unit, tuple[str, ...]],
) -> dict[Unit, Items]:
    """Decomposes those factors of each matrix that `owned` names, one after another.

    Equal shapes share one compiled loop: a batched eigendecomposition can deadlock on
    CPU, and on a GPU it is no faster for factors of more than a few dozen rows.
    """
    decomposed: dict[Unit, Items] = {}
    for sides in dict.fromkeys(owned.values()):
        units = [unit for unit in owned if owned[unit] == sides]

        def one(a: jax.Array, g: jax.Array, sides: tuple[str, ...] = sides) -> Items:
            return curvature.decompose(options, {"a": a, "g": g}, damping, sides)

        pairs = [
            tuple(_widen(factors[path][side][number]) for side in SIDES)
            for path, number in units
        ]
        results = batching.map_equal_shapes(one, pairs, sequential=True)
        decomposed |= dict(zip(units, results, strict=True))
    return decomposed


def _widen(factor: jax.Array) -> jax.Array:
    """Returns a factor in float32 or better: LAPACK has no 16-bit decompositions."""
    return factor.astype(jnp.promote_types(factor.dtype, jnp.float32))


def _precondition(
    options: KfacOptions, items: Mapping[Unit, Items], matrices: Matrices, damping: Any
) -> dict[Unit, jax.Array]:
    """Preconditions the matrices that `items` has decompositions of, in batches."""

    def one(kept: Items, matrix: jax.Array) -> jax.Array:
        return curvature.precondition(options, kept, matrix, damping)

    units = list(items)
    results = batching.map_equal_shapes(one, [(items[u], matrices[u]) for u in units])
    return dict(zip(units, results, strict=True))


class Local:
    """Every device decomposes all factors and preconditions all gradients."""

    def __init__(self, chosen: Plan, options: KfacOptions) -> None:
        self.plan, self.options = chosen, options

    def init(self, dtype: Any) -> Any:
        """Returns empty decompositions, marked as not yet computed."""
        layers = {
            f"{path}/{number}": {
                name: jnp.zeros(shape, dtype)
                for name, shape in curvature.item_shapes(
                    self.options, block.a, block.g
                ).items()
            }
            for (path, number), block in self.plan.units.items()
        }
        return {"layers": layers, MADE: jnp.zeros((), bool)}

    def valid(self, kept: Any) -> Any:
        """Returns whether decompositions have been computed, a traced boolean."""
        return kept[MADE]

    def refresh(self, kept: Any, factors: Factors, damping: Any) -> tuple[Any, Any]:
        """Decomposes all factors; returns the new state and whether all are finite.

        Where one is not, the state stays as it was.
        """
        owned = dict.fromkeys(self.plan.units, SIDES)
        items = _decompose(self.options, factors, damping, owned)
        # Cast first: what is finite may be too large for 16 bits.
        layers = jax.tree.map(
            lambda new, old: new.astype(old.dtype),
            {f"{path}/{number}": items[path, number] for path, number in items},
            kept["layers"],
        )
        finite = _all_finite(layers)
        return _select(finite, {"layers": layers, MADE: finite}, kept), finite

    def precondition(self, kept: Any, matrices: Matrices, damping: Any) -> Matrices:
        """Applies the inverse curvature to every matrix."""
        items = {
            (path, number): kept["layers"][f"{path}/{number}"]
            for path, number in self.plan.units
        }
        return _precondition(self.options, items, matrices, damping)


class Shared:
    """KAISA: each device keeps the decompositions of its column in one flat buffer.

    The buffer is a `PerDevice` of the receivers' axis: globally `[n, length]`, a row
    for each column of the grid, replicated over the gradient workers of that column.

    `jax.lax.switch` over the device's rank selects what a device computes. All branches
    of a switch must return the same shapes, hence the padding below, and collectives
    must stay outside, as devices in different branches would wait for each other.
    """

    def __init__(
        self, chosen: Plan, options: KfacOptions, distribution: Distribution
    ) -> None:
        self.plan, self.options, self.grid = chosen, options, distribution
        self.layout: Layout = make_layout(chosen, options, distribution)
        # Stored with the buffer: a buffer from a checkpoint of another grid, whose
        # layout differs, is recognised and computed anew.
        self.mark = jnp.int32(self.layout.fingerprint)

    def init(self, dtype: Any) -> Any:
        """Returns empty decompositions, marked as not yet computed."""
        buffer = jnp.zeros((self.layout.length,), dtype)
        return PerDevice(
            value={"buffer": buffer, MADE: jnp.zeros((), jnp.int32)},
            axis=RECEIVER_AXIS,
            resize="reset",
        )

    def valid(self, kept: Any) -> Any:
        """Returns whether decompositions of this layout have been computed.

        The result is the same on all devices.

        Raises:
          ConfigError: the surrounding mesh is not that of the distribution, or the
            state was not entered.
        """
        buffer = kept.value["buffer"]
        like = jax.ShapeDtypeStruct((self.layout.length,), buffer.dtype)
        per_device.require_entered(buffer, like, "K-FAC's state")
        sizes = {axis: jax.lax.axis_size(axis) for axis in AXES}
        if sizes != self.grid.mesh_shape:
            raise ConfigError(
                f"the mesh must be that of the distribution, {self.grid.mesh_shape}: "
                f"got {sizes}"
            )
        return assume_equal(kept.value[MADE], AXES) == self.mark

    def refresh(self, kept: Any, factors: Factors, damping: Any) -> tuple[Any, Any]:
        """Decomposes each factor on its owner and broadcasts it within the column."""
        old, layout = kept.value["buffer"], self.layout
        longest = max(words for _, words in layout.spans)

        def branch(rank: int) -> Any:
            def run(factors: Factors, damping: Any) -> jax.Array:
                owned = layout.owned[rank]
                items = _decompose(self.options, factors, damping, owned)
                # In the order of the layout: matrices as owned, then `item_shapes`.
                flat = [items[u][name].ravel() for u in owned for name in items[u]]
                whole = jnp.concatenate([*flat, jnp.zeros(longest)], dtype=old.dtype)
                return vary(whole[:longest], AXES)

            return run

        branches = [branch(rank) for rank in range(self.grid.axis_size)]
        rank = jax.lax.axis_index(AXES)
        # `switch` may type its result as equal on all devices; each took its own
        # branch.
        piece = vary(jax.lax.switch(rank, branches, factors, damping), AXES)
        bad = jax.lax.psum(jnp.any(~jnp.isfinite(piece)).astype(jnp.int32), AXES)
        finite = bad == 0
        buffer = assume_equal(self._gather(piece, old), WORKER_AXIS)
        new = {"buffer": buffer, MADE: vary(self.mark, RECEIVER_AXIS)}
        return PerDevice(
            value=_select(finite, new, kept.value),
            axis=kept.axis,
            resize=kept.resize,
        ), finite

    def _gather(self, piece: jax.Array, like: jax.Array) -> jax.Array:
        """Assembles the buffer of this device's column from its workers' pieces."""
        column = jax.lax.axis_index(RECEIVER_AXIS)
        buffer = vary(jnp.zeros_like(like), AXES)
        for number, members in enumerate(self.grid.columns):
            for rank in members:
                offset, words = self.layout.spans[rank]
                if not words:
                    continue
                # All devices run the collective, as in any SPMD program, but it moves
                # data within this column only; other columns discard what they got.
                others = [member for member in members if member != rank]
                received = broadcast(piece[:words], AXES, [[rank, *others]])
                filled = jax.lax.dynamic_update_slice(buffer, received, (offset,))
                buffer = jnp.where(column == number, filled, buffer)
        return buffer

    def precondition(self, kept: Any, matrices: Matrices, damping: Any) -> Matrices:
        """Preconditions each matrix in its column and broadcasts it within the rows."""
        layout, grid = self.layout, self.grid
        sizes = [
            sum(matrices[unit].size for unit in layout.units(column))
            for column in range(grid.receivers)
        ]
        dtype = next(iter(matrices.values())).dtype

        def branch(column: int) -> Any:
            def run(buffer: jax.Array, matrices: Matrices, damping: Any) -> Any:
                items: dict[Unit, Items] = {unit: {} for unit in layout.units(column)}
                for piece in layout.columns[column]:
                    words = buffer[piece.offset : piece.offset + piece.size]
                    items[piece.unit][piece.name] = words.reshape(piece.shape)
                new = _precondition(self.options, items, matrices, damping)
                flat = [new[unit].ravel() for unit in layout.units(column)]
                # A switch returns the results of all columns: zeros for the others.
                results = [jnp.zeros((size,), dtype) for size in sizes]
                if flat:
                    results[column] = jnp.concatenate(flat).astype(dtype)
                return vary(results, AXES)

            return run

        branches = [branch(column) for column in range(grid.receivers)]
        column = jax.lax.axis_index(RECEIVER_AXIS)
        buffer = vary(kept.value["buffer"], AXES)
        results = jax.lax.switch(column, branches, buffer, matrices, damping)
        done: dict[Unit, jax.Array] = {}
        for number, flat in enumerate(vary(results, AXES)):
            # In each row the device in column `number` has the result and is the root.
            groups = [_move_first(row, row[number]) for row in grid.rows]
            whole = broadcast(flat, AXES, groups) if flat.size else flat
            done |= _split(assume_equal(whole, AXES), layout.units(number), matrices)
        return done


def _move_first(row: list[int], root: int) -> list[int]:
    """Returns the row with `root` first, as `broadcast` wants it."""
    return [root, *(member for member in row if member != root)]


def _split(flat: jax.Array, units: list[Unit], like: Matrices) -> dict[Unit, jax.Array]:
    """Splits `flat` into the matrices that lie one after another in it."""
    matrices, start = {}, 0
    for unit in units:
        shape = like[unit].shape
        matrices[unit] = flat[start : start + like[unit].size].reshape(shape)
        start += like[unit].size
    return matrices


def _all_finite(tree: Any) -> jax.Array:
    leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(leaves))


def _select(use: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(use, n.astype(o.dtype), o), new, old)
