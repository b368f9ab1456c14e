"""What tables are made of, against figures by hand."""

import dataclasses
import importlib

import numpy as np
import pytest
import xarray as xr

from hpcjax.runs import code, reduce
from hpcjax.runs.tables import Table, grid
from tests.experiments import rows

TABLE = reduce.from_cells({"a, 1": {"x": 2.0}, "a, 2": {"x": 6.0}, "b": {"x": 3.0}})


def test_a_table_of_several_runs_has_no_single_one():
    run = rows.run(x=1.0)
    assert reduce.single({"all": run})["x"].item() == 1.0
    with pytest.raises(ValueError, match=r"must be one row: got \['a', 'b'\]"):
        reduce.single({"a": run, "b": run})


def test_rows_are_runs_or_labels_of_their_dimensions():
    run = rows.run({"mode": ["fast", "slow"]}, x=("mode", [1.0, 2.0]), y=5.0)
    other = run * 10
    assert reduce.by_run({"p": run, "q": other})["y"].values.tolist() == [5.0, 50.0]
    parts = {"p": reduce.first(run), "q": reduce.first(other)}
    stacked = reduce.stack(parts, "mode")
    assert stacked["row"].values.tolist() == [
        "p, fast",
        "p, slow",
        "q, fast",
        "q, slow",
    ]
    assert stacked["x"].values.tolist() == [1.0, 2.0, 10.0, 20.0]
    assert stacked["y"].values.tolist() == [5.0, 5.0, 50.0, 50.0]

    @reduce.along("mode")
    def made(run, mode):
        return {"x": run["x"].sel(mode=mode).item()}

    own = made({"p": run, "q": other})
    xr.testing.assert_equal(own, stacked[["x"]])


def test_measurements_become_a_middle_and_its_interval():
    values = xr.DataArray([3.0, 1.0, np.inf, 2.0, 4.0], dims="seed")
    found = reduce.interval(values, "steps")
    assert found["steps"] == 3.0
    assert 1.0 <= found["steps_low"] <= 3.0 < found["steps_high"]
    assert reduce.extent(values[:2], "x") == {"x": 2.0, "x_low": 1.0, "x_high": 3.0}


def test_ratios_are_of_the_same_round_whatever_the_rows_are_called():
    run = rows.run(
        {"method": ["eigh", "jorge"]},
        seconds=("method repetition", [[1.0, 2.0, 4.0], [0.5, 1.0, 2.0]]),
    )
    table = reduce.ratios(reduce.first(run)["seconds"], "eigh")
    own = table.sel(row="jorge")
    assert (float(own["milliseconds"]), float(own["ratio"])) == (1000.0, 0.5)
    assert float(own["ratio_low"]) == float(own["ratio_high"]) == 0.5


def test_claims_read_cells_and_how_they_compare():
    assert reduce.cell("x", "b")(TABLE) == 3.0
    assert reduce.over("x", "a, 2", "b")(TABLE) == 2.0
    assert reduce.above("x", "a, 1", "b")(TABLE) == -1.0
    assert (reduce.least("x")(TABLE), reduce.most("x")(TABLE)) == (2.0, 6.0)
    assert reduce.most("x", "1", "b")(TABLE) == 3.0
    with pytest.raises(KeyError):
        reduce.cell("x", "c")(TABLE)


def test_a_rows_name_means_no_row_whose_name_is_longer():
    cells = {"p = 0.9": 1.0, "p = 0.95": 2.0, "plain": 3.0, "plain, late": 4.0}
    table = reduce.from_cells({row: {"x": value} for row, value in cells.items()})
    assert reduce.of("x", "plain", "p = 0.9").read(table).tolist() == [1.0, 3.0]
    assert reduce.of("x", "late", "p =").read(table).tolist() == [1.0, 2.0, 4.0]
    with pytest.raises(KeyError, match="no row's name holds 'plane'"):
        reduce.of("x", "plane", "late").read(table)


def test_an_extreme_of_what_is_unknown_is_unknown():
    table = reduce.from_cells({"a": {"x": 1.0}, "b": {"y": 2.0}})
    assert np.isnan(reduce.most("x")(table))
    assert np.isnan(reduce.least("x")(table))
    assert reduce.most("x", "a")(table) == 1.0


def test_a_grid_has_a_row_for_each_combination():
    sizes = {"S=2": {"group_size": "2"}, "S=4": {"group_size": "4", "tau": "0"}}
    made = grid("p/c:{0}", ("one", "two"), sizes, seeds=(0, 1), between=" ")
    assert list(made) == ["one S=2", "one S=4", "two S=2", "two S=4"]
    last = made["two S=4"]
    assert (last.config, last.seeds) == ("p/c:two", (0, 1))
    assert last.overrides == {"group_size": "4", "tau": "0"}


def table_of(columns, **options):
    return Table(id="a/b", title="", paper="", tiers={}, columns=columns, **options)


def test_columns_compute_cells_of_runs_of_the_first_seed():
    table = table_of(
        {
            "x": "x",
            "twice": ("2 x", lambda run: 2 * run["x"]),
            "part": ("of p's", lambda run, rows: run["x"] / rows["p"]["x"]),
            "other": ("differs", reduce.differs("y", "p")),
            "hidden": ("", lambda run: run["z"]),
        }
    )
    assert table.columns == {
        "x": "x",
        "twice": "2 x",
        "part": "of p's",
        "other": "differs",
    }
    seeds = {"seeds": (7, 8)}
    runs = {
        "p": rows.run(x=2.0, y=1.0, z=5.0, **seeds),
        "q": rows.run(x=3.0, y=1.0, **seeds),
        "r": rows.run(x=3.0, y=4.0, **seeds),
    }
    made = table.reduce(runs)
    assert made["row"].values.tolist() == ["p", "q", "r"]
    assert made["twice"].values.tolist() == [4.0, 6.0, 6.0]
    assert made["part"].values.tolist() == [1.0, 1.5, 1.5]
    assert made["other"].values.tolist() == [0.0, 0.0, 1.0]
    np.testing.assert_array_equal(made["hidden"], [5.0, np.nan, np.nan])


def test_a_column_of_which_no_row_has_a_cell_is_an_error():
    table = table_of({"x": "x", "wrong": ("typed", lambda run: run["xx"])})
    with pytest.raises(
        ValueError, match=r"no row has a cell of \['wrong'\]; allowed: x"
    ):
        table.reduce({"p": rows.run(x=1.0)})
    with pytest.raises(ZeroDivisionError):
        table_of({"x": ("x", lambda run: 1 / 0)}).reduce({"p": rows.run(x=1.0)})


def test_labels_become_rows_with_names():
    run = rows.run({"mode": ["fast", "slow"]}, x=("mode", [1.0, 2.0]), y=5.0)
    column = {"x": ("x", lambda run, rows: run["x"] / rows["slow"]["x"]), "y": "y"}
    made = table_of(column, along="mode", named=str.upper).reduce({"all": run})
    assert made["row"].values.tolist() == ["FAST", "SLOW"]
    assert made["x"].values.tolist() == [0.5, 1.0]
    assert made["y"].values.tolist() == [5.0, 5.0]
    both = table_of({"x": "x"}, along="mode").reduce({"p": run, "q": rows.run(x=7.0)})
    assert both["row"].values.tolist() == ["p, fast", "p, slow", "q"]
    assert both["x"].values.tolist() == [1.0, 2.0, 7.0]


def test_a_table_may_reduce_by_itself():
    table = table_of({"x": "x"}, reduce=reduce.by_run)
    assert table.reduce is reduce.by_run
    assert dataclasses.replace(table_of({"x": ("X", abs)}), title="t").columns == {
        "x": "X"
    }


TABLES = """
from hpcjax.runs.tables import Table

def times(factor):
    return lambda run: factor * run["x"]

def table(**columns):
    return Table(id="a/b", title="", paper="", tiers={}, columns=columns)

LAMBDA = table(x=("x", lambda run: 2 * run["x"]))
MADE = table(x=("x", times(3)))
PLAIN = table(x="x")
"""


@pytest.mark.parametrize(
    ("name", "old", "new", "changes"),
    [
        ("LAMBDA", "2 * run", "4 * run", True),
        ("MADE", "times(3)", "times(4)", True),
        ("PLAIN", "2 * run", "4 * run", False),
    ],
)
def test_a_column_that_changes_is_of_other_code(
    tmp_path, monkeypatch, name, old, new, changes
):
    package = f"columns_{name.lower()}"
    file = tmp_path / package / "tables.py"
    file.parent.mkdir()
    (file.parent / "__init__.py").write_text("")
    file.write_text(TABLES)
    monkeypatch.syspath_prepend(tmp_path)
    table = getattr(importlib.import_module(f"{package}.tables"), name)
    before = code.of_reduction(table.reduce)
    file.write_text(TABLES.replace(old, new))
    code.forget()
    assert (code.of_reduction(table.reduce) != before) is changes


def test_what_a_column_is_given_is_in_the_digest():
    found = {
        code.of_reduction(table_of(columns, **options).reduce)
        for columns, options in (
            ({"x": "x"}, {}),
            ({"y": "y"}, {}),
            ({"x": ("x", reduce.differs("x", "p"))}, {}),
            ({"x": ("x", reduce.differs("x", "q"))}, {}),
            ({"x": "x"}, {"along": "mode"}),
        )
    }
    assert len(found) == 5


def test_columns_of_all_seeds_pair_runs_and_keep_what_some_lack():
    runs = {
        "ours": rows.run(seeds=(0, 1, 2)).assign(x=("seed", [1.0, 2.0, 6.0])),
        "theirs": rows.run(seeds=(0, 1)).assign(x=("seed", [2.0, 8.0]), y=5.0),
    }
    cells = {
        "x": reduce.figure("x"),
        "ratio": lambda run, rows: run["x"] / rows["ours"]["x"],
        "y": reduce.figure("y"),
    }
    made = reduce.of_columns(cells, over=reduce.extent)(runs)
    assert made["x"].values.tolist() == [3.0, 5.0]
    assert made["x_low"].values.tolist() == [1.0, 2.0]
    assert made["ratio"].sel(row="theirs") == 3.0  # of 2 / 1 and 8 / 2
    assert made["y"].sel(row="theirs") == 5.0
    assert np.isnan(made["y"].sel(row="ours"))
    first = reduce.of_columns(cells)(runs)
    assert first["x"].values.tolist() == [1.0, 2.0]
    assert "x_low" not in first


def test_a_row_without_a_text_has_the_empty_one():
    """A missing number is NaN; of a missing text, "nan" would be a text."""
    table = reduce.from_cells({"a": {"chosen": "2x4", "x": 1.0}, "b": {}})
    assert table["chosen"].values.tolist() == ["2x4", ""]
    assert np.isnan(table["x"].sel(row="b"))


def test_a_seed_without_a_value_is_not_left_out():
    values = xr.DataArray([0.9, np.nan, 0.8], dims="seed")
    for found in (reduce.interval(values, "x"), reduce.extent(values, "x")):
        assert [*found] == ["x", "x_low", "x_high"]
        assert np.isnan([*found.values()]).all()
