"""What tables are made of, against figures by hand."""

import numpy as np
import pytest
import xarray as xr

from hpcjax.runs import reduce
from hpcjax.runs.tables import grid
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
