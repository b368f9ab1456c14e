"""Optimizer state in tiles, on the devices or in the host's memory.

A tile is of consecutive entries of one parameter. Its state is arrays of its own, for
XLA does not update slices of one array in place, and its step is one donated program,
so that beside parameters and gradients the devices have the state of two tiles. With
several parameters in a program, bits were seen to depend on the size of tiles.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hpcjax.core import checks, shards, trees
from hpcjax.core.errors import ConfigError, Diverged
from hpcjax.core.structs import pytree
from hpcjax.optim.admission import check_elements
from hpcjax.optim.loss_scale import unscale

if TYPE_CHECKING:
    from hpcjax.optim.tiled_config import TiledConfig


class Span(NamedTuple):
    """Entries of a parameter, by its number."""

    leaf: int
    start: int
    size: int


class Tile(NamedTuple):
    """What is kept of a span.

    Attributes:
      state: its entries of each array of the transform's state that is like its
        parameter.
      master: its float32 parameters; None where weights are float32.
    """

    state: tuple[Any, ...]
    master: Any


@pytree
class TiledState:
    """The optimizer's state of a run with `state=tiled`.

    Attributes:
      inner: the transform's state, as it is saved; while steps are taken only numbers,
        which are the same for all tiles, and None for what is like a parameter.
      scaling: the `Scaling` of the loss; None without.
      tiles: while steps are taken, a `Tile` for each; as it is saved, none.
    """

    inner: Any
    scaling: Any = None
    tiles: tuple[Tile, ...] = ()


def cut_tiles(sizes: Sequence[int], tile: int) -> list[Span]:
    """Returns the tiles of parameters of these sizes, all of at most `tile` entries.

    Examples:
      >>> [tuple(span) for span in cut_tiles([3, 1, 4], 3)]
      [(0, 0, 3), (1, 0, 1), (2, 0, 3), (2, 3, 1)]
    """
    checks.require_count(1, tile=tile)
    return [
        Span(leaf, start, min(tile, size - start))
        for leaf, size in enumerate(sizes)
        for start in range(0, size, tile)
    ]


class TiledTransform:
    """A transform whose state is cut into tiles.

    Its programs see the whole tree, in which what is not in the tile has no entries: so
    rules match all paths, in every tile. Containers such as `optax.partition`, `masked`
    and `MultiSteps` go inside, as `tx`; around it, as around `flax.nnx.Optimizer`'s,
    is no place: it is no transform, and dispatches and donates by itself.

    Args:
      tx: works on elements.
      shapes: of the parameters, float32.
      config: how it is cut.

    Raises:
      ConfigError: a transform that mixes entries, or parameters of another dtype.
    """

    def __init__(
        self, tx: optax.GradientTransformation, shapes: Any, config: "TiledConfig"
    ) -> None:
        flat = trees.flatten(shapes)
        odd = {path: str(x.dtype) for path, x in flat.items() if x.dtype != jnp.float32}
        checks.require(not odd, "state in tiles is of float32 parameters", others=odd)
        check_elements(tx, shapes)
        self._tx, self.config = optax.with_extra_args_support(tx), config
        self._params, self._shapes = jax.tree.structure(shapes), list(flat.values())
        self._paths = list(flat)
        self.tiles = cut_tiles([x.size for x in self._shapes], config.tile)
        held = jax.eval_shape(tx.init, shapes)
        self._state, self._kinds = jax.tree.structure(held), jax.tree.leaves(held)
        numbered = jax.tree.unflatten(self._params, range(len(self._shapes)))
        # The number of the parameter that each array of the state is like, or -1.
        owners = shards.map_state(
            lambda leaf, at: leaf if shards.is_masked(leaf) else at,
            tx,
            held,
            numbered,
            other=lambda leaf: leaf if shards.is_masked(leaf) else -1,
        )
        self._owners: list[int] = jax.tree.leaves(owners)
        pairs = zip(trees.flatten(held), self._owners, strict=True)
        # The paths of what is cut in the transform's state.
        self.cut_paths = [path for path, owner in pairs if owner >= 0]
        self._jitted = jax.jit(self._step, static_argnums=(0, 1), donate_argnums=3)
        # Apart: in the step XLA would copy the whole parameter first.
        self._write = jax.jit(_write, donate_argnums=0)

    def cut(self, params: Any, state: TiledState) -> tuple[Any, TiledState]:
        """Returns weights and state while steps are taken, of those that are saved.

        Shapes give shapes.
        """
        whole, inner = jax.tree.leaves(params), jax.tree.leaves(state.inner)
        narrow = self.config.dtype != "float32"
        tiles = tuple(
            Tile(
                tuple(self._part(inner[at], span) for at in self._kept(span.leaf)),
                self._part(whole[span.leaf], span) if narrow else None,
            )
            for span in self.tiles
        )
        pairs = zip(inner, self._owners, strict=True)
        rest = [leaf if owner < 0 else None for leaf, owner in pairs]
        numbers = jax.tree.unflatten(self._state, rest)
        made = dataclasses.replace(state, inner=numbers, tiles=tiles)
        return self.narrow(params), made

    def join(self, params: Any, state: TiledState) -> tuple[Any, TiledState]:
        """Returns parameters and state as they are saved, of those of steps."""
        like, numbers = jax.tree.leaves(params), iter(jax.tree.leaves(state.inner))
        groups: list[list[Tile]] = [[] for _ in like]
        for span, tile in zip(self.tiles, state.tiles, strict=True):
            groups[span.leaf].append(tile)
        wide = [leaf.astype(jnp.float32) for leaf in like]
        for leaf, group in enumerate(groups):
            if masters := [tile.master for tile in group if tile.master is not None]:
                wide[leaf] = _join(self._shapes[leaf], masters, like[leaf].sharding)
        held = []
        for at, owner in enumerate(self._owners):
            if owner < 0:
                held.append(next(numbers))
                continue
            nth, place = self._kept(owner).index(at), self._place(like[owner])
            parts = [tile.state[nth] for tile in groups[owner]]
            held.append(_join(self._kinds[at], parts, place))
        inner = jax.tree.unflatten(self._state, held)
        made = TiledState(inner=inner, scaling=state.scaling)
        return jax.tree.unflatten(self._params, wide), made

    def narrow(self, params: Any) -> Any:
        """Returns parameters, or their shapes, in the dtype of weights."""
        dtype = self.config.dtype

        def cast(leaf: Any) -> Any:
            is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
            return leaf.update(dtype=dtype) if is_shape else leaf.astype(dtype)

        return jax.tree.map(cast, params)

    def update(
        self,
        grads: Any,
        state: TiledState,
        params: Any,
        *,
        watch: Callable[[], None] = lambda: None,
        **extras: Any,
    ) -> tuple[Any, TiledState]:
        """Takes the steps of all tiles, two at a time; it donates weights and tiles.

        Args:
          grads: finite gradients, with the loss scale, like `params`.
          state: that of `cut`.
          params: the weights.
          watch: is called after each tile.
          extras: what the transform gets.

        Returns:
          Weights and state.

        Raises:
          ConfigError: it is traced.
          Diverged: a number is infinite or NaN after it. Then there is no way back: all
            tiles have been written.
        """
        slopes, weights = jax.tree.leaves(grads), jax.tree.leaves(params)
        if any(isinstance(x, jax.core.Tracer) for x in slopes + weights):
            raise ConfigError(
                "an update of state in tiles is a program for each tile, and so is not "
                "traced: call it outside of jit, or train with state=tiled"
            )
        after, tiles, lost = jax.tree.leaves(state.inner), list(state.tiles), []
        told = after, state.scaling, extras
        for at, span in enumerate(self.tiles):
            given = self._give(at, slopes, tiles, weights, told)
            tiles[at], part, after, bad = self._jitted(*given)
            weights[span.leaf] = self._write(weights[span.leaf], part, given[5])
            lost.append(bad)
            if at >= 2:
                jax.block_until_ready(tiles[at - 2])
            watch()
        pairs = zip(self.tiles, jax.device_get(lost), strict=True)
        if names := [self._paths[span.leaf] for span, bad in pairs if bad]:
            raise Diverged(
                "after finite gradients the optimizer's state or parameters of "
                f"{names[0]} are non-finite, in {len(names)} of {len(lost)} tiles; "
                "what the checkpoints hold is of steps before"
            )
        inner = jax.tree.unflatten(jax.tree.structure(state.inner), after)
        new = TiledState(inner=inner, scaling=state.scaling, tiles=tuple(tiles))
        return jax.tree.unflatten(self._params, weights), new

    def lower(
        self, at: int, grads: Any, state: TiledState, params: Any, **extras: Any
    ) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
        """Returns a tile's programs: its step, and what writes its weights."""
        slopes, weights = jax.tree.leaves(grads), jax.tree.leaves(params)
        told = jax.tree.leaves(state.inner), state.scaling, extras
        given = self._give(at, slopes, state.tiles, weights, told)
        part = jax.ShapeDtypeStruct(self._piece(*given[:2]), given[2].dtype)
        write = self._write.lower(given[2], part, given[5])
        return self._jitted.lower(*given), write

    def _give(
        self, at: int, slopes: Any, tiles: Sequence[Tile], weights: Any, told: Any
    ) -> tuple[Any, ...]:
        """Returns the arguments of a tile's step."""
        leaf, start, size = self.tiles[at]
        return leaf, size, weights[leaf], tiles[at], slopes[leaf], np.int32(start), told

    def _step(
        self,
        leaf: int,
        size: int,
        weights: jax.Array,
        tile: Tile,
        slope: jax.Array,
        start: Any,
        told: Any,
    ) -> tuple[Tile, jax.Array, list[Any], jax.Array]:
        """Returns the tile, weights, the state's numbers, and whether one is lost."""
        numbers, scaling, extras = told
        if self.config.space == "host":
            tile = jax.device_put(tile, jax.memory.Space.Device)

        def take(x: jax.Array) -> jax.Array:
            entries = jax.lax.dynamic_slice_in_dim(x.reshape(-1), start, size)
            return entries.reshape(self._piece(leaf, size))

        wide = take(weights) if tile.master is None else tile.master
        # Apart from slices, so that bits are the same for all sizes.
        slope, own = jax.lax.optimization_barrier((unscale(take(slope), scaling), wide))
        state = self._with_parts(leaf, numbers, tile.state)
        updates, state = self._tx.update(
            self._spread(leaf, slope), state, self._spread(leaf, own), **extras
        )
        moved, held = jax.tree.leaves(updates)[leaf], jax.tree.leaves(state)
        kept = [held[at] for at in self._kept(leaf)]
        new = (own + moved).astype(own.dtype)
        kept, new = jax.lax.optimization_barrier((kept, new))
        narrow = new.astype(weights.dtype)
        # Nothing of before is asked: what is donated would have to be kept for it.
        finite = [jnp.isfinite(x).all() for x in (*kept, narrow)]
        made = Tile(tuple(kept), None if tile.master is None else new)
        if self.config.space == "host":
            made = jax.device_put(made, jax.memory.Space.Host)
        after = [held[at] for at in self._kept(-1)]
        # The tile first: what is donated goes to the first outputs of its shape, and a
        # host's buffer must not become the weights'.
        return made, narrow, after, ~jnp.stack(finite).all()

    def _spread(self, leaf: int, part: Any) -> Any:
        """Returns a tree like the parameters, of which one has these entries alone."""
        leaves = [self._empty(at, jnp.float32) for at in range(len(self._shapes))]
        leaves[leaf] = part
        return jax.tree.unflatten(self._params, leaves)

    def _with_parts(self, leaf: int, numbers: Sequence[Any], parts: Any) -> Any:
        """Returns the transform's state, of which a parameter's has these alone."""
        given = {-1: iter(numbers), leaf: iter(parts)}
        leaves = [
            next(given[owner]) if owner in given else self._empty(owner, kind.dtype)
            for kind, owner in zip(self._kinds, self._owners, strict=True)
        ]
        return jax.tree.unflatten(self._state, leaves)

    def _kept(self, leaf: int) -> list[int]:
        """Returns which arrays of the state are like a parameter; of -1, the others."""
        return [at for at, owner in enumerate(self._owners) if owner == leaf]

    def _piece(self, leaf: int, size: int) -> tuple[int, ...]:
        """Returns the shape of so many entries: of the parameter's dimensions."""
        ndim = len(self._shapes[leaf].shape)
        return (*(1,) * (ndim - 1), size) if ndim else ()

    def _empty(self, leaf: int, dtype: Any) -> jax.Array:
        return jnp.zeros(self._piece(leaf, 0) or (0,), dtype)

    def _place(self, param: Any) -> Any:
        """Returns where the state of a parameter lies."""
        if self.config.space == "device":
            return param.sharding
        return param.sharding.with_memory_kind("pinned_host")

    def _part(self, array: Any, span: Span) -> Any:
        """Returns a span of an array of the saved state, in the place of tiles."""
        shape, place = self._piece(span.leaf, span.size), self._place(array)
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, array.dtype, sharding=place)
        flat = np.asarray(array).reshape(-1)[span.start : span.start + span.size]
        # A view, which JAX may keep, would keep the whole array.
        return jax.device_put(flat.reshape(shape).copy(), place, may_alias=False)


def _join(like: Any, parts: Sequence[Any], place: Any) -> jax.Array:
    """Returns an array, which may be empty, of its parts."""
    flat = [np.asarray(part).reshape(-1) for part in parts]
    whole = np.concatenate([np.zeros(0, like.dtype), *flat]).reshape(like.shape)
    return jax.device_put(whole, place, may_alias=False)


def _write(weights: jax.Array, part: jax.Array, start: Any) -> jax.Array:
    flat, part = weights.reshape(-1), part.reshape(-1)
    flat = jax.lax.dynamic_update_slice(flat, part, (start,))
    return flat.reshape(weights.shape)
