"""Training of a table in the host's memory, or on disk, as a training method."""

import contextlib
import dataclasses
import itertools
import math
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hpcjax import data, optim
from hpcjax.core import checks, trees
from hpcjax.core.method import (
    Around,
    Batch,
    Method,
    Optimization,
    PassResult,
    RunShape,
    StepInput,
    Totals,
)
from hpcjax.core.model import Model
from hpcjax.core.varying import Axes, assume_equal
from hpcjax.optim.methods import Link, whole_backward
from hpcjax.train.disk_rows import DiskRows
from hpcjax.train.row_cache import (
    RowCache,
    cache_shapes,
    list_row_leaves,
    split_rows,
)
from hpcjax.train.state import TrainState

if TYPE_CHECKING:
    from hpcjax.train.row_cache_config import RowCacheConfig


def train_cached(
    config: "RowCacheConfig", optimizer: Optimization, mean: Any, setup: RunShape
) -> Method:
    """Returns the method of `state=row_cache`; see `RowCacheConfig.build`.

    What is saved is the state of training the whole table. While steps are taken, the
    table and what the optimizer keeps of its rows are in a `data.RowStore`, and the
    state has a cache in their place. On disk they are there all the time, see
    `DiskRows`, and the state that is saved has one row in their place.
    """
    checks.require(
        jax.process_count() == 1,
        "state=row_cache has the rows of one process",
        processes=jax.process_count(),
    )
    params, _ = jax.eval_shape(setup.model.init, jax.random.key(0))
    x = setup.batch["x"]
    rule = (
        "state=row_cache needs a model with a parameter 'table', such as dlrm, and "
        "examples with 'ids' of its rows, or links"
    )
    inputs = sorted(x) if isinstance(x, Mapping) else ()
    fits = "table" in params and ("ids" in inputs or {*inputs} >= _LINKS)
    checks.require(fits, rule, parameters=sorted(params), inputs=inputs)
    optim.check_rows_apart(optimizer.tx)
    rows = len(params["table"])
    ids = sum(math.prod(x[name].shape) for name in inputs if name in _ROWS)
    least, given, what = min(rows, ids), ids * config.lookahead, "the ids of a batch"
    if config.policy == "partitions":
        whole, own = hasattr(setup.examples, "resident"), setup.examples
        rule = "policy=partitions needs examples in an order of partitions: take links"
        checks.require(whole, rule, examples=type(own).__name__)
        config = dataclasses.replace(config, piece=own.partition_rows)
        least = given = (own.capacity + config.prefetch) * own.partition_rows
        what = "the resident partitions"
    capacity = config.capacity or min(rows, given)
    rule = f"capacity must be at least {min(rows, least)}, for {what}"
    checks.require(capacity >= min(rows, least), rule, capacity=capacity)
    method = optim.data_parallel(
        optimizer, mean=_mean_of_rows(mean), gradients=_slots_besides
    )
    params, opt_state = jax.eval_shape(method.init, params)
    held = trees.flatten({"params": params, "opt_state": opt_state})
    kept = {path: held[path] for path in list_row_leaves(held)}
    row_bytes = trees.num_bytes(kept) // rows
    chosen = getattr(setup.examples, "row_bytes", None) or row_bytes
    rule = f"dataset.row_bytes must be the {row_bytes} bytes of a row"
    checks.require(chosen == row_bytes, rule, row_bytes=chosen)
    host, outside = _Host(config, capacity, inputs), {}
    if config.store == "disk":
        method, outside = _put_on_disk(host, method, setup.model, kept)
    around = Around(
        trained=host.trained,
        start=lambda state, batches: host.start(state, batches, setup.steps),
        enter=host.enter,
        leave=host.leave,
        tell=host.tell,
        view=host.view,
        pause=host.pause,
        **outside,
    )
    facts = {"cache_rows": float(capacity), "row_bytes": float(row_bytes)}
    return method._replace(around=around, facts={**method.facts, **facts})


def _put_on_disk(
    host: "_Host", method: Method, model: Model, kept: Mapping[str, Any]
) -> tuple[Method, dict[str, Any]]:
    """Returns a method whose state has no rows, and what is around it besides."""
    rule = "store=disk needs a model whose table is drawn by its rows"
    checks.require(model.rows is not None, rule, model=model)
    assert model.rows is not None
    _check_drawn(model.rows)
    host.disk = DiskRows(model, method.init, kept, host.piece)
    outside: dict[str, Any] = {
        name: getattr(host.disk, name) for name in ("open", "mark", "check")
    }
    if host.of_links:  # ranks are among all rows
        outside["score"] = host.score
    return method._replace(init=_without_rows(method.init)), outside


def _check_drawn(rows: Callable[[Any, Any, int], Any]) -> None:
    """Raises ConfigError if a row's draw depends on how many are drawn with it."""
    key = jax.random.key(0)
    alone, beside = rows(key, 1, 1), rows(key, 0, 2)[1:]
    alone, beside = (np.asarray(each, np.float32) for each in (alone, beside))
    rule = "store=disk needs a table whose rows are drawn alike however many there are"
    good = np.allclose(alone, beside, rtol=1e-2)
    checks.require(good, rule, alone=alone.ravel()[:3], beside=beside.ravel()[:3])


def _without_rows(init: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns an `init` that makes one row in the place of a table, and no other."""

    def begin(params: Any) -> Any:
        table = params["table"]
        row = jnp.zeros((1, *table.shape[1:]), table.dtype)
        return init({**params, "table": row})

    return begin


def _slots_besides(one_pass: StepInput, params: Any, state: Any) -> PassResult:
    """Returns gradients, and the slots of this device's rows for their mean."""
    found = whole_backward(one_pass, params, state)
    slots = _row_numbers(one_pass.batch["x"], jnp)
    return found._replace(extras={**found.extras, "slots": slots})


def _mean_of_rows(mean: Link) -> Link:
    """Returns a mean that sends of the cache only the rows that a batch has.

    No device has a gradient of any other row.
    """

    def link(axes: Axes) -> optax.GradientTransformation:
        inner = optax.with_extra_args_support(mean(axes))

        def update(
            updates: Any, state: Any, params: Any = None, **extras: Any
        ) -> tuple[Any, Any]:
            slots, cache = extras.pop("slots"), updates["table"]
            devices = jax.lax.axis_size(axes)
            if devices == 1 or devices * slots.size >= len(cache):
                return inner.update(updates, state, params, **extras)
            every = jax.lax.all_gather(slots, axes, tiled=True)
            rows = {**updates, "table": cache[every]}
            made: Any = inner.update(rows, state, params, **extras)
            means, state = made
            table = jnp.zeros(cache.shape, cache.dtype).at[every].set(means["table"])
            return {**means, "table": assume_equal(table, axes)}, state

        return optax.GradientTransformationExtraArgs(inner.init, update)

    return link


class _Host:
    """Moves rows around the steps of a run; what it does is told at `Around`.

    Each start plans anew, up to the next pause.
    """

    def __init__(
        self, config: "RowCacheConfig", capacity: int, inputs: Sequence[str]
    ) -> None:
        self._config, self._capacity = config, capacity
        self._told: dict[int, dict[str, float]] = {}
        self._opened = contextlib.ExitStack()
        self.disk: DiskRows | None = None
        self.piece, self.of_links = config.piece, "ids" not in inputs

    def trained(self, state: TrainState) -> TrainState:
        self._shapes = cache_shapes(state, self._capacity)
        return trees.unflatten(state, trees.flatten(state) | self._shapes)

    def start(self, state: TrainState, batches: data.Batches, steps: int) -> TrainState:
        first = int(state.step)
        rows, state = split_rows(state, self._capacity)
        self._bare = rows
        if self.disk is not None:
            rows = self.disk.begin(first, batches.seed)
        self._store = data.RowStore(rows, **self._open_link())
        self._cache = RowCache(self._store, state, piece=self._config.piece)
        began = time.perf_counter()
        # Read once more, ahead of the steps that get them, by a thread of its own.
        reader = batches.iterate(first, ahead=1 + self._config.lookahead)
        known = itertools.islice(self._opened.enter_context(reader), steps - first)
        ids = (_row_numbers(each["x"], np) for each in known)
        if self._config.policy == "partitions":
            moves = self._swap(batches, ids, range(first, steps))
        else:
            moves = self._moves(ids, len(self._store))
        self._turns = data.assign_slots(moves, len(self._store), self._capacity)
        self._cache.leave(state, next(self._turns))
        self._turn = next(self._turns)
        self._planned, self._totals = time.perf_counter() - began, {}
        return state

    def _swap(
        self, batches: Any, ids: Iterator[np.ndarray], numbers: range
    ) -> Iterator[data.Move]:
        """Returns what is moved in the order of the data set."""
        given = batches.batch_size, batches.seed
        states = [batches.source.resident(number, *given) for number in numbers]
        cut = len(self._store), self._config.piece, self._config.prefetch
        return data.partition_moves(states, ids, *cut)

    def _open_link(self) -> dict[str, Callable[[int], None]]:
        """Returns how reading and writing take their time, by `data.RowStore`'s names.

        It is another one each time, so that nothing is waited for that a pause ended.
        """
        rate, latency = self._config.rate, self._config.latency
        if rate is None:
            return {}
        folder = pathlib.Path(self._opened.enter_context(tempfile.TemporaryDirectory()))
        ways = {
            name: data.SharedRate(folder / name, rate, latency)
            for name in ("reading", "writing")
        }
        for way in ways.values():
            self._opened.callback(way.close)
        return {name: way.take for name, way in ways.items()}

    def _moves(self, ids: Iterator[np.ndarray], rows: int) -> Iterator[data.Move]:
        """Returns what the policy moves."""
        policy, near = self._config.policy, self._config.prefetch
        if policy == "static_hot":
            known = list(ids)
            hot = data.hottest_rows(known, rows, self._capacity, near)
            return data.static_moves(known, hot, near)
        if policy == "lru":
            return data.lru_moves(ids, self._capacity, near)
        ahead = self._config.lookahead if policy == "lookahead" else 0
        return data.lookahead_moves(ids, rows, ahead)

    def enter(
        self, state: TrainState, batch: Batch, number: int
    ) -> tuple[TrainState, Batch]:
        del number
        state = self._cache.enter(state, self._turn.step)
        return state, _with_ids(batch, self._turn.slots)

    def leave(self, state: TrainState, number: int) -> TrainState:
        self._cache.leave(state, self._turn)
        began = time.perf_counter()
        # While the step is taken; after the last one there is no turn.
        self._turn = next(self._turns, self._turn)
        self._planned += time.perf_counter() - began
        totals = {f"rows_{what}": count for what, count in self._cache.moved.items()}
        totals |= {"wait_seconds": self._cache.waited, "plan_seconds": self._planned}
        self._told[number] = {
            name: total - self._totals.get(name, 0) for name, total in totals.items()
        }
        self._totals = totals
        return state

    def tell(self, number: int) -> dict[str, float]:
        return self._told.pop(number)

    def view(self, state: TrainState) -> Callable[[Batch], tuple[Any, Batch]]:
        self._cache.flush(state)
        table, cache = self._store.arrays["params/table"], self._shapes["params/table"]

        if self.of_links:  # ranks are among all rows
            whole = jax.device_put(np.asarray(table), cache.sharding)
            return lambda batch: ({**state.params, "table": whole}, batch)

        def look(batch: Batch) -> tuple[Any, Batch]:
            ids = batch["x"]["ids"]
            unique, slots = np.unique(ids, return_inverse=True)
            rows = np.zeros(cache.shape, cache.dtype)
            rows[: len(unique)] = table[unique]
            params = {**state.params, "table": jax.device_put(rows, cache.sharding)}
            return params, _with_ids(batch, slots.reshape(ids.shape))

        return look

    def pause(self, state: TrainState) -> TrainState:
        self._cache.flush(state)
        self._cache.close()
        self._opened.close()
        rows = self._store.arrays
        if self.disk is not None:
            self.disk.flush()
            rows = self._bare
        return trees.unflatten(state, trees.flatten(state) | rows)

    def score(
        self, state: TrainState, batches: Iterable[Batch]
    ) -> Iterator[Totals | None]:
        assert self.disk is not None
        self._cache.flush(state)
        yield from self.disk.score_links(state, batches)


# What examples have numbers of rows in.
_LINKS = {"triples", "negatives"}
_ROWS = {"ids"} | _LINKS


def _row_numbers(x: Any, xp: Any) -> Any:
    """Returns the numbers of rows in a batch, by `numpy` or `jax.numpy`.

    Of links they are the ends, and then the negatives, [batch, numbers].
    """
    if "ids" in x:
        return x["ids"]
    parts = x["triples"][..., ::2], x["negatives"]
    return xp.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


def _with_ids(batch: Batch, slots: np.ndarray) -> Batch:
    """Returns a batch that has slots in the place of the numbers of rows."""
    x, slots = batch["x"], slots.astype(np.int32)
    if "ids" in x:
        return {**batch, "x": {**x, "ids": slots}}
    triples, negatives = x["triples"].copy(), x["negatives"]
    ends = slots[:, : slots.shape[1] - negatives[0].size]
    triples[..., ::2] = ends.reshape(triples[..., ::2].shape)
    wrong = slots[:, ends.shape[1] :].reshape(negatives.shape)
    return {**batch, "x": {**x, "triples": triples, "negatives": wrong}}
