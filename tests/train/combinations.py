"""Rows that cover all pairs of parts, and training loops of one's own for them."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from hpcjax import averaging, core, data, optim, sharding, train
from hpcjax.core import after, parts, per_device, trees
from hpcjax.data.objectives import (
    CLASSIFICATION,
    LANGUAGE,
    SEGMENTATION,
    VERTICES,
)
from hpcjax.optim import kfac
from hpcjax.runs import overrides
from hpcjax.runs.training import with_stacks
from tests.train import hlo_order

# What makes a part do all that it does within two steps; see also `Config.smoke`.
SMALL: dict[str, dict[str, Any]] = {
    "jorge": {"update_every": 1},
    "jorge_from_sgd": {"update_every": 1},
    "shampoo": {"roots_every": 1},
    "kfac": {"factor_update_steps": 1, "inv_update_steps": 1},
    "partial": {"k": 2, "cuts": (1,)},
    "random_freezing": {"k": 2, "cuts": (1,)},
    "pipedream": {"stages": 2, "versions": "double"},
    "power_sgd": {"rank": 2},
    "wagma": {"tau": 2},
    "eager": {"mode": "sync"},
    "gnn": {"dropout": 0.0},
}
# One of each family: perceptrons, convolutions with batch norms, stacks of blocks.
FAMILIES = ("mlp", "unet", "causal_lm")
OBJECTIVES = CLASSIFICATION, LANGUAGE, SEGMENTATION, VERTICES
SPARSE = {"density": 0.3}
DEVICES = (4, 1)
STEPS, ROWS = 2, 8
KINDS = (
    *("optimizer", "exchange", "averaging", "backward", "parallel", "model"),
    "devices",
)
# Those that one method is composed of.
PARTS = KINDS[:5]


class Row(NamedTuple):
    """One combination, by the parts' names; None for none."""

    optimizer: str
    exchange: str | None
    averaging: str | None
    backward: str | None
    parallel: str | None
    model: str
    devices: int


def choices() -> dict[str, tuple[Any, ...]]:
    """Returns what each place of a row can hold."""
    own = {"optimizer", "model"}
    found = {
        kind: (() if kind in own else (None,)) + _of_rooms(kind) for kind in KINDS[:-1]
    }
    return {**found, "model": FAMILIES, "devices": DEVICES}


def _of_rooms(kind: str) -> tuple[str, ...]:
    """Returns the parts but those of papers, which have tests of their own.

    And but `jorge_from_sgd`, which makes Jorge's transform of SGD's values: it has a
    row of its own, `DERIVED`. And but `ted`, which only spreads models with experts,
    `pipeline`, for models with a cut, and `spatial`, for those that take blocks: see
    `test_ted`, `test_pipeline` and `test_space`.
    """
    places = parts.list_places(kind).items()
    apart = ("jorge_from_sgd", "ted", "pipeline", "spatial")
    return tuple(
        name
        for name, place in places
        if place.startswith("hpcjax.") and name not in apart
    )


DERIVED = Row("jorge_from_sgd", "ok_topk", "local_sgd", None, None, "causal_lm", 4)
# A graph network, whose data set it is made with.
OF_GRAPH = Row("jorge", "ok_topk", "wagma", None, None, "gnn", 4)


def refused() -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """Returns the pairs of parts that do what only one can.

    What spreads parameters over devices leaves no optimizer a whole one.
    """
    claims = {
        (kind, name): {
            *getattr(cls, "claims", ()),
            *(["whole"] if kind == "parallel" or getattr(cls, "whole", False) else []),
        }
        for kind in PARTS
        for name, cls in parts.classes(kind).items()
        if name in _of_rooms(kind)
    }
    return [
        (a, b)
        for a, b in itertools.combinations(claims, 2)
        if a[0] != b[0] and claims[a] & claims[b]
    ]


def never() -> set[frozenset[Any]]:
    """Returns the pairs of parts that no row has: refused, or the model is not cut."""
    return {frozenset(pair) for pair in refused()} | {
        frozenset({("parallel", "tensor3d"), ("model", "unet")})
    }


def covering() -> list[Row]:
    """Returns rows in which every two parts of different kinds meet, unless refused.

    Each row is built around a pair that is not covered yet, and every other place takes
    what covers most; of equals the first, which is what compiles in the least time.
    """
    options = choices()
    places = list(options)
    without = never()
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(places, 2)
        for x in options[a]
        for y in options[b]
        if frozenset({(a, x), (b, y)}) not in without
    }
    rows = []
    while missing:
        held = dict(min(missing, key=str))
        for place in sorted(places, key=lambda p: -len(options[p])):
            if place not in held:
                gains = {
                    value: sum(
                        _pair(places, (place, value), other) in missing
                        for other in held.items()
                    )
                    for value in options[place]
                    if not _meets(without, (place, value), held)
                }
                held[place] = max(gains, key=gains.__getitem__)
        covered = itertools.combinations(held.items(), 2)
        missing -= {_pair(places, a, b) for a, b in covered}
        rows.append(Row(**held))
    return rows


def quick(rows: list[Row]) -> set[Row]:
    """Returns some of the rows, in which every part is at least once.

    First those of several devices and of the model that compiles in the least time; of
    these the one with most parts that are in none yet.
    """
    missing = set().union(*map(_items, rows))
    chosen = set()
    while missing:
        new = [row for row in rows if missing & _items(row)]
        best = max(
            new,
            key=lambda row: (
                row.devices,
                -FAMILIES.index(row.model),
                len(missing & _items(row)),
            ),
        )
        chosen.add(best)
        missing -= _items(best)
    return chosen


def _items(row: Row) -> set[tuple[str, Any]]:
    return set(zip(KINDS, row, strict=True))


def _meets(never: set[frozenset[Any]], item: Any, held: dict[str, Any]) -> bool:
    return any(frozenset({item, other}) in never for other in held.items())


def _pair(places: list[str], a: Any, b: Any) -> Any:
    return (a, b) if places.index(a[0]) < places.index(b[0]) else (b, a)


def config(kind: str, name: str | None) -> Any:
    """Returns a small part."""
    if name is None:
        return None
    cls = parts.classes(kind)[name]
    fields = {field.name for field in dataclasses.fields(cls)}
    small = {k: v for k, v in SPARSE.items() if k in fields}
    return overrides.parse(cls(**small, **SMALL.get(name, {})), cls.smoke)


def configs(row: Row) -> dict[str, Any]:
    """Returns the parts of a row that make its method, as they fit each other."""
    found = {kind: config(kind, getattr(row, kind)) for kind in PARTS}
    if row.averaging:
        found["averaging"] = dataclasses.replace(
            found["averaging"], workers=workers(row)
        )
    stacks = getattr(parts.classes("model")[row.model], "stacks", ())
    return {kind: with_stacks(part, stacks) for kind, part in found.items()}


def workers(row: Row) -> int:
    """Returns how many models there are; two devices share one."""
    if row.averaging == "eager":
        return row.devices
    return max(1, row.devices // 2) if row.averaging else 1


class Made(data.Source):
    """Random examples of any kind, by name."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays["y"])

    def gather(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {name: rows[indices] for name, rows in self.arrays.items()}


def dataset(takes: Callable[[core.Objective], bool], size: int) -> data.Dataset:
    """Returns examples of the first objective that a model takes."""
    objective = next(filter(takes, OBJECTIVES))
    rng, count = np.random.default_rng(0), ROWS * STEPS
    outputs, inputs = 5, (size, size, 1)
    if objective is LANGUAGE:
        inputs = (6,)
        tokens = rng.integers(0, outputs, (2, count, 6)).astype(np.int32)
        arrays = {"x": tokens[0], "y": tokens[1]}
    elif objective is VERTICES:
        club = data.KarateConfig().load()
        members = rng.permutation(34)[:count].astype(np.int32)
        arrays = {"x": members, "y": club.train.labels[members]}
        return club._replace(train=Made(arrays), validation=Made(arrays))
    else:
        x = rng.standard_normal((count, *inputs)).astype(np.float32)
        shape = (count, size, size) if objective is SEGMENTATION else (count,)
        arrays = {"x": x, "y": rng.integers(0, outputs, shape).astype(np.int32)}
    return data.Dataset(Made(arrays), Made(arrays), inputs, outputs, objective)


def problem(name: str) -> tuple[Any, data.Dataset]:
    """Returns a small model of a family, and examples for it."""
    made = config("model", name)
    own = dataset(made.takes, 8)
    given = {} if own.graph is None else {"graph": own.graph}
    return made.make(own.inputs, own.outputs, **given), own


def task_of(row: Row) -> train.Task:
    """Returns what the training experiment makes of a row."""
    model, own = problem(row.model)
    made = configs(row)
    method = train.compose(
        model,
        own,
        made["optimizer"],
        exchange=made["exchange"],
        backward=made["backward"],
        averaged=made["averaging"],
        parallel=made["parallel"],
        batch_size=ROWS,
        steps=STEPS,
        devices=row.devices,
    )
    return train.supervised(model, method, own)


def own_loop(row: Row, model: Any, own: data.Dataset, params: Any, state: Any) -> Any:
    """Takes the steps of a row as a user would, with optax and `shard_map` alone.

    Nothing of `train` or of `core.method` is used, nor types of what varies.

    Returns:
      The parameters, the mean of all models where workers have their own.
    """
    if row.averaging == "eager":  # nobody is late: one model, and its gradients' mean
        row = row._replace(averaging=None)
    made, count = configs(row), row.devices // workers(row)
    mesh = sharding.make_mesh({"worker": workers(row), "data": count})
    axes = ("worker", "data")
    tx, curvature = made["optimizer"], None
    if row.optimizer == "kfac":
        tx, curvature = tx.make(STEPS, model, count)
    else:
        tx = tx.make(STEPS)
    chained = optax.with_extra_args_support(
        optax.chain(*_links(row, made["exchange"], model, own), tx)
    )
    worker, first = _worker(row, chained), params

    def step(held, opt, state, batch, number):
        held, opt = per_device.enter((held, opt))
        params = held.value if worker else held
        inner = opt.own.value.inner if worker else opt

        def loss(outputs, labels):
            totals = own.objective(outputs, {**batch, "y": labels})
            return totals.sums["loss"] / totals.count, totals.count

        def forward(params, taps=None):
            return model.apply(
                params, state, batch["x"], train=True, key=None, taps=taps or None
            )

        extras = {"step": number}
        if curvature:
            due = kfac.statistics_due(inner)
            taps = kfac.make_taps(
                curvature.plan, model, params, state, batch["x"], active=due
            )
            made = kfac.differentiate(forward, loss, params, taps, batch["y"])
            grads, new = made.grads, made.aux
            extras |= {"taps": made.statistics, "loss_terms": made.loss_aux}
        else:

            def whole(params):
                outputs, new = forward(params)
                return loss(outputs, batch["y"])[0], new

            # Weights of one update ago are the first ones, in both steps.
            at = first if row.backward == "pipedream" else params
            grads, new = jax.grad(whole, has_aux=True)(at)
        if row.backward == "partial":
            # Of two roles the first has no gradient of the first block.
            role = (jax.lax.axis_index("data") + number) % 2 + 1
            lower = set(_blocks(model, own).paths[0])
            kept = {
                path: jnp.where(role == 1, 0, leaf) if path in lower else leaf
                for path, leaf in trees.flatten(grads).items()
            }
            grads = trees.unflatten(grads, kept)
        if worker:
            params, opt = worker.step(grads, opt, params, **extras)
            held = per_device.wrap(params, "worker")
        else:
            updates, opt = chained.update(grads, opt, params, **extras)
            held = optax.apply_updates(params, updates)
        new = jax.lax.pmean(after(new, held), axes)
        return *per_device.leave((held, opt)), new

    opt = (worker or chained).init(params)
    held = per_device.wrap(params, "worker") if worker else params
    held, opt = per_device.expand((held, opt), mesh)
    specs = per_device.specs((held, opt))
    run = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(*specs, P(), P(axes), P()),
            out_specs=(*specs, P()),
            check_vma=False,
        )
    )
    # Placed as steps return them, or the second step would be compiled once more.
    placed = [jax.sharding.NamedSharding(mesh, spec) for spec in (P(), P(axes))]
    held, opt, state = jax.device_put(
        (held, opt, state), (*sharding.state_shardings((held, opt), mesh), placed[0])
    )
    batches = [own.train.gather(np.arange(ROWS) + ROWS * at) for at in range(STEPS)]
    batches = [jax.device_put(batch, placed[1]) for batch in batches]
    run = run.lower(held, opt, state, batches[0], jnp.int32(0)).compile()
    assert not hlo_order.swappable(run.as_text())
    for number, batch in enumerate(batches):
        held, opt, state = run(held, opt, state, batch, jnp.int32(number))
    return per_device.average_outside(held)


def _links(row: Row, exchange: Any, model: Any, own: data.Dataset) -> list[Any]:
    if row.backward == "partial":
        roles = optim.PartialBackward(blocks=_blocks(model, own), mode="zeros")
        return [optim.contributor_mean(roles, "data")]
    if row.exchange:
        return [optim.exchange_gradients(exchange, "data")]
    mean = [optim.all_reduce_mean("data")]
    if row.backward == "random_freezing":
        mean.append(optim.freeze_at_random(_blocks(model, own), 0))
    return mean


def _blocks(model: Any, own: data.Dataset) -> optim.Blocks:
    x = own.train.gather(np.arange(ROWS))["x"]
    return optim.cut_layers(optim.layers_of_model(model, x), (1,))


def _worker(row: Row, tx: Any) -> averaging.Averaging | None:
    made = {
        None: lambda: None,
        "adpsgd": lambda: averaging.adpsgd("worker", tx),
        "dpsgd": lambda: averaging.dpsgd("worker", tx),
        "local_sgd": lambda: averaging.local_sgd("worker", tx),
        "sgp": lambda: averaging.sgp("worker", tx),
        "wagma": lambda: averaging.wagma("worker", tx, group_size=workers(row), tau=2),
    }
    return made[row.averaging]()
