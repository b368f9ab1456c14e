"""Tables of data movement: small runs, and what their claims say of them."""

import pytest

from experiments.data_movement import compiled, layouts, movement, tables
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
