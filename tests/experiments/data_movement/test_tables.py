"""Tables of data movement: small runs, and what their claims say of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from experiments.data_movement import (
    compiled,
    controls,
    counted,
    layouts,
    movement,
    tables,
)
from hpcjax import kernels
from tests.experiments.rows import verdicts

SMALL = {"batch": 1, "length": 4, "heads": 2, "width": 8}


def runs_of(table, module, *configs):
    """A table made of runs of these configs."""
    rows = zip(table.tier("model").runs, configs, strict=False)
    return table.reduce(
        {row: module.run(cfg, None).expand_dims(seed=[0]) for row, cfg in rows}
    )


@pytest.mark.acceptance("data-movement", 9)
def test_the_four_savings_of_the_stated_lists():
    made = runs_of(
        tables.MOVEMENT,
        movement,
        *(
            movement.Config(softmax=softmax, kernels=kernels, masks=masks)
            for softmax in ("joint", "apart")
            for kernels, masks in (
                ("none", "stored"),
                ("paper", "stored"),
                ("paper", "recomputed"),
            )
        ),
    )
    assert all(verdict.holds for verdict in verdicts(tables.MOVEMENT, made).values())
    assert made["total"].values.tolist() == [1160, 996, 884, 1256, 996, 884]


def test_operators_have_rows_of_their_own():
    made = runs_of(
        tables.OPERATORS,
        movement,
        movement.Config(),
        movement.Config(kernels="paper"),
    )
    assert verdicts(tables.OPERATORS, made)["bound by memory"].holds
    assert float(made["read"].sel(row="fused, BDRLB")) == 48
    lin1 = made.sel(row="unfused, lin1")
    assert float(lin1["intensity"]) == pytest.approx(32 * 1024 / 24)


def test_a_selection_that_fails_is_infinite():
    layer = movement.Config(kernels="paper", **SMALL)
    exact, path = (
        layouts.run(layouts.Config(method=method, passes="forward", layer=layer), None)
        for method in ("exact", "fp_first")
    )
    assert float(exact["seconds"]) == pytest.approx(float(path["seconds"]))
    assert float(exact["gap"]) < 1e-9
    assert float(path["gap"]) == float("inf")


def test_the_fused_graph_moves_less_than_the_primitives():
    made = runs_of(
        tables.COMPILED,
        compiled,
        *(compiled.Config(count=count, **SMALL) for count in ("primitives", "fused")),
    )
    words = made["words"]
    assert float(words.sel(row="fused")) < 0.9 * float(words.sel(row="primitives"))
    assert float(made["flops"].min()) > 1


def test_words_of_kernels_are_counted_and_a_second_read_fails_all_claims():
    pytest.importorskip("triton", reason="`make kernels` has not been called")
    small = {"batch": 1, "length": 2, "heads": 2, "width": 4}
    names = ("kernels", "kernels, x twice")
    once, twice = (
        counted.run(counted.Config(execution=name, **small), None) for name in names
    )
    # Two norms of 2 rows of 4 read their input once more, which is small here, and
    # write what they read it for.
    assert float(twice["small"] - once["small"]) * 2**10 == 2 * (2 * 4 + 2)
    listed = counted.run(counted.Config(execution="list", **small), None)
    assert float(listed["contraction"]) == float(once["contraction"])


@pytest.mark.acceptance("data-movement", 9)
def test_claims_on_counted_words_fail_for_a_second_read():
    """From figures of the sizes of the table, which takes minutes."""
    figures = (
        ("list", "stored", None),
        ("kernels", "stored", (468, 336, 172, 1)),
        ("kernels", "recomputed", (468, 256, 140, 1)),
        ("fused list", "stored", None),
        ("fused list", "recomputed", None),
        ("kernels, x twice", "stored", (468, 344, 172, 2)),
        ("kernels, x twice", "recomputed", (468, 264, 140, 2)),
    )
    rows, names = {}, tuple(tables.KERNELS.tier("cpu").runs)
    for name, (execution, masks, numbers) in zip(names, figures, strict=True):
        if numbers is None:
            cfg = counted.Config(execution=execution, masks=masks)
            found = counted.run(cfg, None)
        else:
            kinds = ("contraction", "statistical", "elementwise", "most")
            figure = dict(zip(kinds, numbers, strict=True), small=44)
            found = xr.Dataset({key: float(n) for key, n in figure.items()})
        rows[name] = found.expand_dims(seed=[0])
    made = tables.KERNELS.reduce(rows)
    found = verdicts(tables.KERNELS, made)
    assert all(verdict.holds for verdict in found.values())
    assert made["total"].values[:5].tolist() == [1160, 976, 864, 996, 884]


def test_other_masks_in_the_gradient_change_it():
    x = jnp.ones((8, 16))

    def gradient():
        def fn(x):
            y = kernels.softmax_dropout(x, jnp.uint32(1), rate=0.5)
            return (y * jnp.arange(16)).sum()

        return np.asarray(jax.grad(fn)(x))

    right = gradient()
    with controls.other_masks():
        assert abs(gradient() - right).max() > 0.1
    np.testing.assert_array_equal(gradient(), right)
