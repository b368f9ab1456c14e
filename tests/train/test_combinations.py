"""Every two parts of a training config, together: in the loop and in one's own."""

import dataclasses
import pathlib

import chex
import jax
import numpy as np
import pytest

from hpcjax import sharding, train
from hpcjax.core import ConfigError, per_device, trees
from hpcjax.runs import discover
from hpcjax.runs.training import TrainingConfig
from hpcjax.train import snapshot
from tests.train import combinations, hlo_order
from tests.train.combinations import DERIVED, OF_GRAPH, ROWS, Row

REPOSITORY = pathlib.Path(__file__).parents[2]
discover.activate(REPOSITORY)  # whose papers list parts, too
COVERING = combinations.covering()
QUICK = combinations.quick(COVERING)


def test_every_pair_of_parts_is_in_a_row_or_refused():
    options = combinations.choices()
    never = combinations.never()
    places = list(options)
    for i, a in enumerate(places):
        for b in places[i + 1 :]:
            met = {(getattr(row, a), getattr(row, b)) for row in COVERING}
            for x in options[a]:
                for y in options[b]:
                    banned = frozenset({(a, x), (b, y)}) in never
                    assert ((x, y) in met) is not banned, (a, x, b, y)


def test_every_part_is_in_a_row_that_is_not_slow():
    for place, names in combinations.choices().items():
        assert {getattr(row, place) for row in QUICK} == set(names)


@pytest.mark.parametrize(("left", "right"), combinations.refused())
def test_parts_that_do_the_same_are_refused_by_name(left, right):
    given = {kind: combinations.config(kind, name) for kind, name in (left, right)}
    with pytest.raises(ConfigError, match=f"{left[1]}(?: and|,? ).*{right[1]} "):
        TrainingConfig(**given)


# Parts that go together, but not on the devices, or with the model, of a row.
TOO_FEW = "workers must be a multiple of k"


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            id="-".join(map(str, row)),
            marks=() if row in {*QUICK, OF_GRAPH} else pytest.mark.slow,
        )
        for row in [*COVERING, DERIVED, OF_GRAPH]
    ],
)
def test_parts_train_together_as_in_a_loop_of_ones_own_and_resume(row: Row):
    if row.backward == "partial" and row.devices == 1:
        with pytest.raises(ConfigError, match=TOO_FEW):
            combinations.task_of(row)
        return
    task = combinations.task_of(row)
    mesh = task.mesh(row.devices)
    start = train.init_state(task, 0, mesh)
    begin = jax.device_get(
        (per_device.average_outside(start.params), start.model_state)
    )
    first, second = (
        sharding.place_batch(task.dataset.train.gather(np.arange(ROWS) + at), mesh)
        for at in (0, ROWS)
    )
    step = train.train_step(task, mesh, start).lower(start, first).compile()
    # On a busy processor devices would take these in different orders, and wait for
    # ever: `core.after`.
    assert not hlo_order.swappable(step.as_text())
    state, _ = step(start, first)
    kept = snapshot.take(state)
    state, metrics = step(state, second)
    assert np.isfinite(metrics["loss"])
    assert not np.any(metrics["nonfinite"])
    ours = jax.device_get(per_device.average_outside(state.params))
    model, _ = combinations.problem(row.model)  # which `task.model` may have split
    theirs = combinations.own_loop(row, model, task.dataset, *begin)
    for path, leaf in trees.flatten(ours).items():
        if path == "blocks/attention/key/bias":
            continue  # adds the same to all scores of a query: no gradient but rounding
        other = np.asarray(trees.flatten(theirs)[path])
        scale = max(1.0, np.abs(leaf).max(initial=0))
        np.testing.assert_allclose(leaf, other, atol=1e-6 * scale, err_msg=path)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(initial=0), ours, begin[0])
    assert max(jax.tree.leaves(moved)) > 1e-5

    like = train.state_shapes(task, mesh)
    resumed = snapshot.fit(arrays(kept), None, like, mesh)
    again, _ = step(resumed, second)
    chex.assert_trees_all_equal(numbers(again), numbers(state))


def numbers(state):
    """Returns a state's numbers, also those of its key."""
    data = jax.random.key_data(state.key)
    return jax.device_get(dataclasses.replace(state, key=data))


def arrays(kept):
    """Returns what was saved of a state; of empty arrays only shapes are."""
    return {
        path: kept.blocks[path][0][1]
        if path in kept.blocks
        else np.zeros(leaf.shape, leaf.dtype)
        for path, leaf in kept.leaves.items()
    }
