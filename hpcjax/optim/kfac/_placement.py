"""Decomposing and preconditioning: here, or shared out over the devices of a grid.

Both placements have the same functions: `init`, `refresh` and `precondition`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax.collectives import broadcast
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
from hpcjax.optim.kfac.config import KfacOptions

Matrices = Mapping[Unit, Float[Array, "a g"]]
Factors = Mapping[str, Mapping[str, jax.Array]]
MADE = "made"


def _decompose(
    options: KfacOptions,
    factors: Factors,
    damping: Any,
    owned: Mapping[Unit, tuple[str, ...]],
) -> dict[Unit, Items]:
    """Decomposes the given sides of the given matrices, one after another.

    Equal shapes share one compiled loop: a batched eigendecomposition can deadlock on
    CPU, and on a GPU it is no faster for factors of more than a few dozen rows.
    """
    found: dict[Unit, Items] = {}
    for sides in dict.fromkeys(owned.values()):
        units = [unit for unit in owned if owned[unit] == sides]

        def one(a: jax.Array, g: jax.Array, sides: tuple[str, ...] = sides) -> Items:
            return curvature.decompose(options, {"a": a, "g": g}, damping, sides)

        pairs = [
            tuple(_wide(factors[path][side][number]) for side in SIDES)
            for path, number in units
        ]
        results = batching.map_equal_shapes(one, pairs, sequential=True)
        found |= dict(zip(units, results, strict=True))
    return found


def _wide(factor: jax.Array) -> jax.Array:
    """Returns a factor in a precision that decompositions exist for."""
    return factor.astype(jnp.promote_types(factor.dtype, jnp.float32))


def _precondition(
    options: KfacOptions, items: Mapping[Unit, Items], found: Matrices, damping: Any
) -> dict[Unit, jax.Array]:
    """Preconditions the matrices that `items` has, equal shapes in one batch."""

    def one(kept: Items, matrix: jax.Array) -> jax.Array:
        return curvature.precondition(options, kept, matrix, damping)

    units = list(items)
    results = batching.map_equal_shapes(one, [(items[u], found[u]) for u in units])
    return dict(zip(units, results, strict=True))


class Local:
    """Every device decomposes and keeps everything."""

    def __init__(self, chosen: Plan, options: KfacOptions) -> None:
        self.plan, self.options = chosen, options

    def init(self, dtype: Any) -> Any:
        """Returns decompositions that are still to be made."""
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
        """Says whether decompositions have been made."""
        return kept[MADE]

    def refresh(self, kept: Any, factors: Factors, damping: Any) -> tuple[Any, Any]:
        """Decomposes all factors; returns what to keep, and whether it is finite."""
        owned = dict.fromkeys(self.plan.units, SIDES)
        made = _decompose(self.options, factors, damping, owned)
        layers = {f"{path}/{number}": made[path, number] for path, number in made}
        finite = _finite(layers)
        return _chosen(finite, {"layers": layers, MADE: finite}, kept), finite

    def precondition(self, kept: Any, found: Matrices, damping: Any) -> Matrices:
        """Returns every matrix times the inverse curvature."""
        items = {
            (path, number): kept["layers"][f"{path}/{number}"]
            for path, number in self.plan.units
        }
        return _precondition(self.options, items, found, damping)


class Shared:
    """KAISA: one flat buffer on each device, holding the layers of its column.

    The buffer is a `PerDevice` of the receivers' axis: globally `[n, length]`, the same
    on all workers of a column.
    """

    def __init__(
        self, chosen: Plan, options: KfacOptions, distribution: Distribution
    ) -> None:
        self.plan, self.options, self.grid = chosen, options, distribution
        self.layout: Layout = make_layout(chosen, options, distribution)
        # Tells a buffer laid out otherwise, left in a checkpoint by another grid.
        self.mark = jnp.int32(self.layout.fingerprint)

    def init(self, dtype: Any) -> Any:
        """Returns decompositions that are still to be made."""
        buffer = jnp.zeros((self.layout.length,), dtype)
        return PerDevice(
            value={"buffer": buffer, MADE: jnp.zeros((), jnp.int32)},
            axis=RECEIVER_AXIS,
            resize="reset",
        )

    def valid(self, kept: Any) -> Any:
        """Says whether they have been made for this grid; the same on all devices.

        Raises:
          ConfigError: the surrounding mesh is not that of the distribution.
        """
        found = {axis: jax.lax.axis_size(axis) for axis in AXES}
        if found != self.grid.mesh_shape:
            raise ConfigError(
                f"the mesh must be that of the distribution, {self.grid.mesh_shape}: "
                f"got {found}"
            )
        return assume_equal(kept.value[MADE], AXES) == self.mark

    def refresh(self, kept: Any, factors: Factors, damping: Any) -> tuple[Any, Any]:
        """Decomposes each factor on its owner and passes it on in its column."""
        old, layout = kept.value["buffer"], self.layout
        longest = max(words for _, words in layout.spans)

        def branch(rank: int) -> Any:
            def run(factors: Factors, damping: Any) -> jax.Array:
                owned = layout.owned[rank]
                made = _decompose(self.options, factors, damping, owned)
                flat = [made[u][name].ravel() for u in owned for name in made[u]]
                whole = jnp.concatenate([*flat, jnp.zeros(longest)], dtype=old.dtype)
                return vary(whole[:longest], AXES)

            return run

        branches = [branch(rank) for rank in range(self.grid.axis_size)]
        rank = jax.lax.axis_index(AXES)
        # Types: each device takes its own branch, whatever `switch` says.
        piece = vary(jax.lax.switch(rank, branches, factors, damping), AXES)
        bad = jax.lax.psum(jnp.any(~jnp.isfinite(piece)).astype(jnp.int32), AXES)
        finite = bad == 0
        buffer = assume_equal(self._gathered(piece, old), WORKER_AXIS)
        made = {"buffer": buffer, MADE: vary(self.mark, RECEIVER_AXIS)}
        return PerDevice(
            value=_chosen(finite, made, kept.value),
            axis=kept.axis,
            resize=kept.resize,
        ), finite

    def _gathered(self, piece: jax.Array, like: jax.Array) -> jax.Array:
        """Returns the buffer of this device's column from its workers' pieces."""
        column = jax.lax.axis_index(RECEIVER_AXIS)
        buffer = vary(jnp.zeros_like(like), AXES)
        for number, members in enumerate(self.grid.columns):
            for rank in members:
                offset, words = self.layout.spans[rank]
                if not words:
                    continue
                # All devices run the instruction; only this column sends.
                others = [member for member in members if member != rank]
                received = broadcast(piece[:words], AXES, [[rank, *others]])
                filled = jax.lax.dynamic_update_slice(buffer, received, (offset,))
                buffer = jnp.where(column == number, filled, buffer)
        return buffer

    def precondition(self, kept: Any, found: Matrices, damping: Any) -> Matrices:
        """Preconditions each matrix in its column and passes it on in the rows."""
        layout, grid = self.layout, self.grid
        sizes = [
            sum(found[unit].size for unit in layout.units(column))
            for column in range(grid.receivers)
        ]
        dtype = next(iter(found.values())).dtype

        def branch(column: int) -> Any:
            def run(buffer: jax.Array, found: Matrices, damping: Any) -> Any:
                items: dict[Unit, Items] = {unit: {} for unit in layout.units(column)}
                for piece in layout.columns[column]:
                    words = buffer[piece.offset : piece.offset + piece.size]
                    items[piece.unit][piece.name] = words.reshape(piece.shape)
                made = _precondition(self.options, items, found, damping)
                flat = [made[unit].ravel() for unit in layout.units(column)]
                results = [jnp.zeros((size,), dtype) for size in sizes]
                if flat:
                    results[column] = jnp.concatenate(flat).astype(dtype)
                return vary(results, AXES)

            return run

        branches = [branch(column) for column in range(grid.receivers)]
        column = jax.lax.axis_index(RECEIVER_AXIS)
        buffer = vary(kept.value["buffer"], AXES)
        made = jax.lax.switch(column, branches, buffer, found, damping)
        done: dict[Unit, jax.Array] = {}
        for number, flat in enumerate(vary(made, AXES)):
            groups = [_first(row, row[number]) for row in grid.rows]
            whole = broadcast(flat, AXES, groups) if flat.size else flat
            done |= _split(assume_equal(whole, AXES), layout.units(number), found)
        return done


def _first(row: list[int], root: int) -> list[int]:
    return [root, *(member for member in row if member != root)]


def _split(flat: jax.Array, units: list[Unit], like: Matrices) -> dict[Unit, jax.Array]:
    """Returns the matrices that lie one after another in `flat`."""
    found, start = {}, 0
    for unit in units:
        shape = like[unit].shape
        found[unit] = flat[start : start + like[unit].size].reshape(shape)
        start += like[unit].size
    return found


def _finite(tree: Any) -> jax.Array:
    leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(leaves))


def _chosen(use: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(use, n.astype(o.dtype), o), new, old)
