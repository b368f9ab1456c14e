"""Optimizer state in tiles, on the devices or in the host's memory.

A tile is of consecutive entries of one parameter. Its state is arrays of its own, for
XLA does not update slices of one array in place, and its step is one donated program,
so that beside parameters and gradients the devices have the state of two tiles. With
several parameters in a program the compiler contracts other multiplications and
additions, and bits depend on the size of tiles.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hpcjax.core import checks, shards, trees
from hpcjax.core.method import (
    DATA_AXIS,
    Around,
    Method,
    Optimization,
    PassResult,
    RunShape,
    StepInput,
)
from hpcjax.core.structs import pytree
from hpcjax.optim.admission import check_elements
from hpcjax.optim.first_order import clip_global_norm
from hpcjax.optim.loss_scale import Scaling, advance, begin_scaling, scale_pass, unscale
from hpcjax.optim.methods import whole_backward

if TYPE_CHECKING:
    from hpcjax.optim.tiled_config import TiledConfig


class Span(NamedTuple):
    """Entries of a parameter, by its number."""

    leaf: int
    start: int
    size: int


class Tile(NamedTuple):
    """What is kept of a tile.

    Attributes:
      state: for each array of the transform's state and each span of it, its entries.
      master: the float32 parameters of each span; none where weights are float32.
    """

    state: tuple[Any, ...]
    master: tuple[Any, ...]


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


def cut_tiles(sizes: Sequence[int], tile: int) -> list[tuple[Span, ...]]:
    """Returns the tiles of parameters of these sizes, all of at most `tile` entries.

    Examples:
      >>> [[tuple(span) for span in each] for each in cut_tiles([3, 1, 4], 3)]
      [[(0, 0, 3)], [(1, 0, 1)], [(2, 0, 3)], [(2, 3, 1)]]
    """
    checks.require_count(1, tile=tile)
    return [
        (Span(leaf, start, min(tile, size - start)),)
        for leaf, size in enumerate(sizes)
        for start in range(0, size, tile)
    ]


class TiledTransform:
    """A transform whose state is cut into tiles.

    Its programs see the whole tree, in which what is not in the tile has no entries: so
    rules match all paths, in every tile.

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
        self._jitted = jax.jit(self._step, static_argnums=0, donate_argnums=(1, 2))

    def held(self) -> list[str]:
        """Returns the paths of what is cut in the transform's state."""
        paths = trees.flatten(jax.tree.unflatten(self._state, self._kinds))
        pairs = zip(paths, self._owners, strict=True)
        return [path for path, owner in pairs if owner >= 0]

    def cut(self, params: Any, state: TiledState) -> tuple[Any, TiledState]:
        """Returns weights and state while steps are taken, of those that are saved.

        Shapes give shapes.
        """
        whole, inner = jax.tree.leaves(params), jax.tree.leaves(state.inner)
        master = () if self.config.dtype == "float32" else whole
        tiles = tuple(
            Tile(
                tuple(self._part(inner[at], span) for at, span in self._kept(spans)),
                tuple(self._part(master[s.leaf], s) for s in spans if master),
            )
            for spans in self.tiles
        )
        pairs = zip(inner, self._owners, strict=True)
        rest = [leaf if owner < 0 else None for leaf, owner in pairs]
        numbers = jax.tree.unflatten(self._state, rest)
        made = TiledState(inner=numbers, scaling=state.scaling, tiles=tiles)
        return self.narrow(params), made

    def join(self, params: Any, state: TiledState) -> tuple[Any, TiledState]:
        """Returns parameters and state as they are saved, of those of steps."""
        like = jax.tree.leaves(params)
        wide = [leaf.astype(jnp.float32) for leaf in like]  # those of no tile, too
        masters, inner = {}, {}
        for spans, tile in zip(self.tiles, state.tiles, strict=True):
            for (at, span), part in zip(self._kept(spans), tile.state, strict=True):
                self._gather(inner, at, span, part)
            for span, part in zip(spans[: len(tile.master)], tile.master, strict=True):
                self._gather(masters, span.leaf, span, part)
        for at, array in masters.items():
            wide[at] = jax.device_put(array, like[at].sharding, may_alias=False)
        numbers = iter(jax.tree.leaves(state.inner))
        held = []
        for at, owner in enumerate(self._owners):
            if owner < 0:
                held.append(next(numbers))
                continue
            kind, place = self._kinds[at], self._place(like[owner])
            array = inner.get(at, np.zeros(kind.shape, kind.dtype))
            held.append(jax.device_put(array, place, may_alias=False))
        joined = jax.tree.unflatten(self._state, held)
        made = TiledState(inner=joined, scaling=state.scaling)
        return jax.tree.unflatten(self._params, wide), made

    def narrow(self, params: Any) -> Any:
        """Returns parameters, or their shapes, in the dtype of weights."""

        def cast(leaf: Any) -> Any:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf.update(dtype=self.config.dtype)
            return leaf.astype(self.config.dtype)

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
        """
        slopes, weights = jax.tree.leaves(grads), jax.tree.leaves(params)
        before, tiles = jax.tree.leaves(state.inner), list(state.tiles)
        after = before
        for at, spans in enumerate(self.tiles):
            own, tiles[at], after = self._jitted(
                tuple((span.leaf, span.size) for span in spans),
                [weights[span.leaf] for span in spans],
                tiles[at],
                [slopes[span.leaf] for span in spans],
                [np.int32(span.start) for span in spans],
                (before, state.scaling, extras),
            )
            for span, leaf in zip(spans, own, strict=True):
                weights[span.leaf] = leaf
            if at >= 2:
                jax.block_until_ready(tiles[at - 2])
            watch()
        inner = jax.tree.unflatten(jax.tree.structure(state.inner), after)
        new = TiledState(inner=inner, scaling=state.scaling, tiles=tuple(tiles))
        return jax.tree.unflatten(self._params, weights), new

    def _step(
        self,
        signature: tuple[tuple[int, int], ...],
        weights: list[Any],
        tile: Tile,
        grads: list[Any],
        starts: list[Any],
        told: Any,
    ) -> tuple[list[Any], Tile, list[Any]]:
        """Returns weights, the tile and the state's numbers after a tile's step."""
        numbers, scaling, extras = told
        spans = [Span(leaf, 0, size) for leaf, size in signature]
        if self.config.space == "host":
            tile = jax.device_put(tile, jax.memory.Space.Device)

        def take(arrays: list[Any]) -> list[Any]:
            rows = zip(arrays, spans, starts, strict=True)
            return [
                jax.lax.dynamic_slice_in_dim(x.reshape(-1), at, span.size).reshape(
                    self._piece(span)
                )
                for x, span, at in rows
            ]

        master = [x.astype(jnp.float32) for x in tile.master or take(weights)]
        # Apart from slices, the compiler contracts the same multiplications and
        # additions for all sizes.
        slopes, master = jax.lax.optimization_barrier(
            (unscale(take(grads), scaling), master)
        )
        slopes = self._spread(spans, slopes)
        state = self._with_parts(spans, numbers, tile.state)
        updates, state = self._tx.update(
            slopes, state, self._spread(spans, master), **extras
        )
        moved, held = jax.tree.leaves(updates), jax.tree.leaves(state)
        master = [
            (own + moved[span.leaf]).astype(own.dtype)
            for own, span in zip(master, spans, strict=True)
        ]
        kept = [held[at] for at, _ in self._kept(spans)]
        kept, master = jax.lax.optimization_barrier((kept, master))
        new = Tile(tuple(kept), tuple(master) if tile.master else ())
        if self.config.space == "host":
            new = jax.device_put(new, jax.memory.Space.Host)
        written = [
            jax.lax.dynamic_update_slice_in_dim(
                old.reshape(-1), own.reshape(-1).astype(old.dtype), at, 0
            ).reshape(old.shape)
            for old, own, at in zip(weights, master, starts, strict=True)
        ]
        pairs = zip(held, self._owners, strict=True)
        return written, new, [leaf for leaf, owner in pairs if owner < 0]

    def _spread(self, spans: Sequence[Span], parts: Sequence[Any]) -> Any:
        """Returns a tree like the parameters, of which only spans have entries."""
        leaves = [self._empty(at, jnp.float32) for at in range(len(self._shapes))]
        for span, part in zip(spans, parts, strict=True):
            leaves[span.leaf] = part
        return jax.tree.unflatten(self._params, leaves)

    def _with_parts(
        self, spans: Sequence[Span], numbers: Sequence[Any], parts: Sequence[Any]
    ) -> Any:
        """Returns the transform's state, of which only spans have entries."""
        rest = iter(numbers)
        leaves = [
            next(rest) if owner < 0 else self._empty(owner, kind.dtype)
            for kind, owner in zip(self._kinds, self._owners, strict=True)
        ]
        for (at, _), part in zip(self._kept(spans), parts, strict=True):
            leaves[at] = part
        return jax.tree.unflatten(self._state, leaves)

    def _kept(self, spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
        """Yields each array of the transform's state with each of its spans."""
        by_leaf = {span.leaf: span for span in spans}
        for at, owner in enumerate(self._owners):
            if owner in by_leaf:
                yield at, by_leaf[owner]

    def _piece(self, span: Span) -> tuple[int, ...]:
        """Returns the shape of a span: of as many dimensions as the parameter."""
        ndim = len(self._shapes[span.leaf].shape)
        return (*(1,) * (ndim - 1), span.size) if ndim else ()

    def _empty(self, leaf: int, dtype: Any) -> jax.Array:
        return jnp.zeros(self._piece(Span(leaf, 0, 0)) or (0,), dtype)

    def _place(self, param: Any) -> Any:
        """Returns where the state of a parameter lies."""
        if self.config.space == "device":
            return param.sharding
        return param.sharding.with_memory_kind("pinned_host")

    def _part(self, array: Any, span: Span) -> Any:
        """Returns a span of an array of the saved state, in the place of tiles."""
        shape, place = self._piece(span), self._place(array)
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, array.dtype, sharding=place)
        flat = np.asarray(array).reshape(-1)[span.start : span.start + span.size]
        return jax.device_put(flat.reshape(shape), place, may_alias=False)

    def _gather(self, into: dict[int, Any], at: int, span: Span, part: Any) -> None:
        """Writes a span into the array of its number on the host."""
        shape = self._shapes[span.leaf].shape
        whole = into.setdefault(at, np.empty(shape, part.dtype)).reshape(-1)
        whole[span.start : span.start + span.size] = np.asarray(part).reshape(-1)


def train_tiled(
    config: "TiledConfig", optimizer: Optimization, setup: RunShape
) -> Method:
    """Returns data-parallel training whose update is taken tile by tile.

    Gradients, their mean and its norm are one program. If one of them is not finite no
    tile is touched. What is saved is the state of the whole, with float32 parameters,
    so that a run goes on with any other tile and space.

    Args:
      config: of the tiles.
      optimizer: whose transform works on elements.
      setup: the run.

    Raises:
      ConfigError: see `TiledConfig.build`.
    """
    _check_place(config, optimizer)
    shapes, _ = jax.eval_shape(setup.model.init, jax.random.key(0))
    tiled = TiledTransform(optimizer.tx, shapes, config)

    def init(params: Any) -> tuple[Any, TiledState]:
        begun = optimizer.begin(params)
        scaling = begin_scaling(config.loss_scale)
        return begun, TiledState(inner=optimizer.tx.init(begun), scaling=scaling)

    def gradients(one_pass: StepInput, params: Any, state: Any) -> PassResult:
        # Of the state it gets what `seen` shows, the scaling.
        found = whole_backward(scale_pass(one_pass, state), params, None)
        extras = {k: v for k, v in found.extras.items() if k != "value_fn"}
        return found._replace(extras=extras)

    def settle(found: PassResult, scaling: Scaling | None, unscored: Any) -> PassResult:
        finite = [jnp.isfinite(g).all() for g in jax.tree.leaves(found.grads)]
        spoiled = ~jnp.stack(finite).all()
        grads, cleared = _clip(found.grads, optimizer.clip_norm, scaling), unscored
        if scaling is not None and config.loss_scale is not None:
            # The guard of the loop sees what no scale makes finite.
            cleared |= spoiled & (scaling.scale > config.loss_scale.least)
        grads = jax.tree.map(lambda g: jnp.where(cleared, 0, g), grads)
        told = {"spoiled": spoiled | unscored, "unscored": unscored}
        return found._replace(grads=grads, extras={**found.extras, **told})

    def update(found: PassResult, state: Any, params: Any) -> tuple[Any, Any]:
        extras = dict(found.extras)
        spoiled, unscored = jax.device_get(
            (extras.pop("spoiled"), extras.pop("unscored"))
        )
        new = state
        if not spoiled:
            params, new = tiled.update(found.grads, state, params, **extras)
        if config.loss_scale is None or unscored:
            return params, new
        scaling = advance(config.loss_scale, state.scaling, jnp.asarray(not spoiled))
        return params, dataclasses.replace(new, scaling=scaling)

    def move(state: Any, how: Callable[[Any, Any], tuple[Any, Any]]) -> Any:
        params, own = how(state.params, state.opt_state)
        return dataclasses.replace(state, params=params, opt_state=own)

    host = {f"inner/{path}" for path in tiled.held()} if config.space == "host" else ()
    around = Around(
        traced=False,
        seen=lambda state: state.scaling,
        settle=settle,
        on_host=lambda path: path in host,
        trained=lambda state: move(state, tiled.cut),
        start=lambda state, _: move(state, tiled.cut),
        view=lambda state: lambda batch: (tiled.narrow(state.params), batch),
        pause=lambda state: move(state, tiled.join),
    )
    facts = {**optimizer.facts, "tiles": float(len(tiled.tiles))}
    return Method(
        optimizer.mesh_shape, init, gradients, update, facts=facts, around=around
    )


def _clip(grads: Any, most: float | None, scaling: Scaling | None) -> Any:
    """Returns scaled gradients whose norm, without the scale, is at most `most`."""
    if most is None:
        return grads
    clip = clip_global_norm(most * (1 if scaling is None else scaling.scale))
    return clip.update(grads, clip.init(grads))[0]


def _check_place(config: "TiledConfig", optimizer: Optimization) -> None:
    """Raises ConfigError if devices do not hold whole models, or no host memory."""
    rule = "state=tiled is of one process, which holds one whole model on each device"
    alone = jax.process_count() == 1 and optimizer.axes == DATA_AXIS
    processes, axes = jax.process_count(), optimizer.axes
    checks.require(alone, rule, processes=processes, axes=axes)
    if config.space == "host":
        memories = {each.kind for each in jax.devices()[0].addressable_memories()}
        rule = "space=host needs a device with pinned host memory"
        checks.require("pinned_host" in memories, rule, memories=sorted(memories))
