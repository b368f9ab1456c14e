"""Pictures of tables: what is drawn, read back from the figure, and what is refused."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

from hpcjax import cost
from hpcjax.core.errors import ConfigError
from hpcjax.runs import (
    curves,
    drawing,
    packing,
    panels,
    pictures,
    reduce,
    spans_and_fields,
    table_records,
)
from hpcjax.runs.pictures import Bars, Dots, Lines, Map, Scatter, Timeline
from hpcjax.runs.tables import Runs, Table, TableResult, judge, on_cpu
from tests.runs import legible

ROOT = pathlib.Path(__file__).parents[2]
HEADINGS = {"best": "best loss", "steps": "steps", "unit": "unit"}


def result_of(dataset, picture, columns=HEADINGS, claims=None):
    """A table of cells that nothing was run for."""
    table = Table(
        id="paper/name",
        title="A title",
        paper="",
        tiers=on_cpu(runs={"a": Runs(config="a")}, claims=claims or {}, minutes=1),
        columns=dict.fromkeys(columns, "") | columns,
        reduce=lambda rows: dataset,
        picture=picture,
    )
    return TableResult(
        table=table,
        tier="cpu",
        dataset=dataset,
        verdicts=judge(table.tier("cpu"), dataset),
        runs=(),
        tuned={},
        at_edge={},
        rows={},
    )


def draw(*args, **options):
    return drawing.draw(result_of(*args, **options))


def table_of(rows, **columns):
    held = {name: ("row", np.array(cells)) for name, cells in columns.items()}
    return xr.Dataset(held, coords={"row": list(rows)})


@pytest.fixture
def table():
    """Three rows, of which one has missed the target; a column has intervals."""
    cells = {
        "best": ("row", [0.1, 0.2, 0.3]),
        "steps": ("row", [50.0, 40.0, np.inf]),
        "steps_low": ("row", [45.0, 38.0, np.inf]),
        "steps_high": ("row", [60.0, np.inf, np.inf]),
        "steps_by_seed": (
            ("row", "seed"),
            [[45.0, 60.0], [38.0, np.inf], [np.inf] * 2],
        ),
        "unit": ((), 1.0),
    }
    return xr.Dataset(cells, coords={"row": ["sgd", "costs $1", "late"]})


def names_of(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_dots_with_their_intervals_and_seeds(table):
    """What has no end goes beyond all numbers that are shown, with an arrow."""
    (axes,) = draw(table, Dots("steps")).axes
    assert axes.get_xlabel() == "steps"
    seeds, *dots, first, second, arrow = axes.get_lines()
    assert [dot.get_xdata()[0] for dot in dots] == [50, 40, np.inf]
    assert sorted(seeds.get_xdata()) == [38, 45, 60]
    np.testing.assert_array_equal(first.get_xdata(), [45, 60])
    edge = axes.get_xlim()[1]
    assert edge > 60
    np.testing.assert_array_equal(second.get_xdata(), [38, edge])
    assert (arrow.get_marker(), *arrow.get_xdata()) == (">", edge)
    assert [text.get_text() for text in axes.texts] == ["missed"]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["sgd", r"costs \$1", "late"]


def test_an_interval_is_inside_if_it_has_an_end():
    found = table_of(["a", "b"], best=[1.0, 2.0], best_low=[1.0, 0.5])
    found["best_high"] = ("row", [1.0, 9.0])
    (axes,) = draw(found, Dots("best")).axes
    low, high = axes.get_xlim()
    assert (low < 0.5, high > 9) == (True, True)
    assert [line.get_marker() for line in axes.get_lines()] == ["o", "o", "None"]


def test_dots_in_groups_and_in_order():
    found = table_of(["b, x", "a, x", "b, y"], best=[3.0, 2.0, 1.0])
    (axes,) = draw(found, Dots("best", by=", ", sort=True)).axes
    assert [t.get_text() for t in axes.get_yticklabels()] == ["b, y", "b, x", "a, x"]
    places = axes.get_yticks()
    assert places[2] - places[1] > places[1] - places[0]


def test_a_table_that_says_nothing_shows_what_has_intervals(table):
    (axes,) = draw(table, None).axes
    assert axes.get_xlabel() == "steps"
    shown = table.assign(name=("row", ["a", "b", "c"]))
    columns = {"name": "name", "best": "best loss"}
    (axes,) = draw(shown[["name", "best"]], None, columns).axes
    assert axes.get_xlabel() == "best loss"
    assert draw(shown[["name"]], None, columns) is None


def test_lines_by_a_number_of_the_rows_names():
    rows = ["P=64, ours", "P=8, ours", "P=8, theirs", "serial"]
    for name in ("P=many", "P=8th"):
        assert pictures.split(name, "P={}") == (None, name)
    assert pictures.split("P=1/8", "P={}") == ("1/8", "")
    found = table_of(rows, best=[4.0, 2.0, 1.0, 3.0], best_low=[3.0, 1.0, 1.0, 3.0])
    found["best_high"] = found["best"] + 1
    (axes,) = draw(found, Lines("P={}", "best")).axes
    ours, theirs, serial = axes.get_lines()
    np.testing.assert_array_equal(ours.get_xydata(), [[8, 2], [64, 4]])
    np.testing.assert_array_equal(theirs.get_xydata(), [[8, 1]])
    assert [*serial.get_xdata()] == [0, 1]  # across the panel
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("P", "best loss")
    assert names_of(axes.figure) == ["ours", "theirs", "serial"]
    corners = axes.collections[0].get_paths()[0].vertices
    assert {tuple(at) for at in corners} >= {(8, 1), (8, 3), (64, 3), (64, 5)}


def test_lines_along_a_dimension_and_of_several_columns():
    held = {"best": (("row", "step"), [[3.0, 1.0], [4.0, 2.0]])}
    found = xr.Dataset(held, coords={"row": ["a", "b"], "step": [10, 20]})
    (axes,) = draw(found, Lines("step", "best")).axes
    assert [line.get_xydata().tolist() for line in axes.get_lines()] == [
        [[10, 3], [20, 1]],
        [[10, 4], [20, 2]],
    ]
    found = table_of(["4 bits", "2 bits"], best=[1.0, 2.0], steps=[3.0, np.nan])
    (axes,) = draw(found, Lines("{} bits", ("best", "steps"))).axes
    assert names_of(axes.figure) == ["best loss", "steps"]
    assert axes.get_lines()[0].get_xydata().tolist() == [[2, 2], [4, 1]]


def test_bars_side_by_side_and_stacked_from_zero():
    found = table_of(["a", "b"], best=[1.0, np.nan], steps=[2.0, -3.0])
    (axes,) = draw(found, Bars(("best", "steps"))).axes
    assert [bar.get_width() for bar in axes.patches] == [1, 0, 2, -3]
    assert [text.get_text() for text in axes.texts] == ["missing"]
    one, *_, other = [bar.get_hatch() for bar in axes.patches]
    assert one != other
    found = table_of(["a"], best=[1.0], steps=[-2.0], unit=[4.0])
    (axes,) = draw(found, Bars(("best", "steps", "unit"), stacked=True)).axes
    assert [bar.get_x() for bar in axes.patches] == [0, 0, 1]


def test_bars_have_no_logarithmic_axis():
    with pytest.raises(ConfigError, match="bars begin at zero"):
        Bars("best", log=True)
    (axes,) = draw(table_of("ab", best=[1.0, 1e6]), Bars("best")).axes
    assert axes.get_xscale() == "linear"


def test_a_number_is_a_bound():
    (axes,) = draw(table_of("ab", best=[1.0, 2.0]), Dots("best", bound=0.5)).axes
    assert [text.get_text() for text in axes.texts] == ["0.5"]
    assert axes.get_lines()[0].get_xdata()[0] == 0.5


def test_points_with_names_and_the_best_of_them_joined():
    found = table_of("abcd", best=[1.0, 2.0, 3.0, 2.0], steps=[1.0, 3.0, 4.0, 2.0])
    picture = Scatter("best", "steps", front=("least", "most"))
    (axes,) = draw(found, picture).axes
    assert {text.get_text() for text in axes.texts} == set("abcd")
    front = axes.get_lines()[-1]
    np.testing.assert_array_equal(front.get_xydata(), [[1, 1], [2, 3], [3, 4]])


def test_a_timeline_as_it_is_held():
    bars = [cost.Bar(0, 0, 2, "F"), cost.Bar(0, 2, 3, "F"), cost.Bar(1, 3, 7, "B")]
    held = packing.timeline({"one": bars, "two": bars[:1]})
    found = packing.pack(held).to_dataset(name="bars")
    figure = draw(found, Timeline("bars"), {})
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["one", "two"]
    work, late = figure.axes[0].collections
    boxes = [each.get_paths()[0].get_extents() for each in (work, late)]
    np.testing.assert_allclose(
        [b.intervalx for b in boxes], [[0, 3], [3, 7]], atol=1e-3
    )
    assert names_of(figure) == ["F", "B"]


def test_timelines_of_bars_that_are_not_in_a_table():
    bars = [cost.Bar(0, 0, 2, "F"), cost.Bar(2, 3, 7, "B")]
    figure = spans_and_fields.draw_timelines({"$1": bars, "two": bars[:1]}, unit="s")
    assert [axes.get_title(loc="left") for axes in figure.axes] == [r"\$1", "two"]
    assert figure.axes[1].get_xlabel() == "time (s)"
    assert legible.find_faults(figure) == []
    late = figure.axes[0].collections[1].get_paths()[0].get_extents()
    np.testing.assert_allclose([late.intervalx, late.intervaly], [[3, 7], [0.58, 1.42]])
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["0", "2"]


@pytest.mark.parametrize("rows", [{}, {"one": []}])
def test_timelines_of_nothing_are_refused(rows):
    with pytest.raises(ConfigError, match=r"rows with bars in them: got \{"):
        packing.timeline(rows)


def test_packed_numbers_are_those_within_half_a_step():
    values = [[1e9, np.nan, 1e9 + 3], [1e9 + 1, 1e9 + 2, 1e9]]
    for numbers in (np.array(values), np.full((2, 3), 7.0)):
        held = packing.pack(xr.DataArray(numbers, dims=("y", "x")))
        again = packing.unpack(held.to_dataset(name="f"))["f"].values
        span = np.nanmax(numbers) - np.nanmin(numbers)
        np.testing.assert_allclose(again, numbers, rtol=0, atol=0.51 * span / 65534)


def test_a_packed_column_that_lacks_rows_is_refused():
    held = packing.pack(xr.DataArray([1.0, 2.0], {"row": ["a", "b"]}, name="curve"))
    joined = xr.Dataset({"curve": held}).reindex(row=["a", "b", "c"])
    with pytest.raises(ConfigError, match="all rows of curve must be there before"):
        packing.unpack(joined)


@pytest.mark.parametrize("values", [[np.inf, 1], [-np.inf, np.nan], [np.nan], []])
def test_numbers_without_a_least_and_a_largest_are_not_packed(values):
    with pytest.raises(ConfigError, match=r"can be packed: got \d, \d infinite"):
        packing.pack(xr.DataArray(np.array(values, float), dims="x"))


def test_zero_has_a_place_on_a_logarithmic_axis():
    found = table_of("abc", best=[0.0, 1e-3, 10.0])
    (axes,) = draw(found, Dots("best", log=True)).axes
    zero, small, large = axes.transData.transform([(x, 0) for x in (0, 1e-3, 10)])[:, 0]
    assert axes.bbox.x0 < zero < small < large < axes.bbox.x1
    assert large - small > 2 * (small - zero)


def test_what_has_no_number_is_told():
    found = table_of(["P=1", "P=2", "P=4"], best=[1.0, np.inf, np.nan], steps=[1, 2, 3])
    (axes,) = draw(found, Lines("P={}", "best")).axes
    assert axes.get_title(loc="left") == "2 of 3 missed or missing"
    (axes,) = draw(found, Scatter("best", "steps")).axes
    assert axes.get_title(loc="left") == "P=2 missed, P=4 missing"
    stacked = Bars(("best", "steps"), stacked=True)
    (axes,) = draw(found, stacked).axes
    assert [bar.get_x() for bar in axes.patches][3:] == [1, 0, 0]
    assert [text.get_text() for text in axes.texts] == ["missed", "missing"]


def test_names_that_find_no_place_are_told():
    rows = [f"a long name {n}" for n in range(26)]
    found = table_of(rows, best=[1.0] * 25 + [2.0], steps=[1.0] * 25 + [3.0])
    (axes,) = draw(found, Scatter("best", "steps")).axes
    told = axes.get_title(loc="left")
    assert "unnamed" in told
    assert "more" in told
    named = {text.get_text() for text in axes.texts if text.get_text()}
    unnamed = told.count("unnamed") + int(told.split()[-2])
    assert len(named) + unnamed == 26


def test_many_failures_and_long_names_leave_room(judged):
    found = judged[0].assign_coords(row=["ours", "sgd " * 60, "another"])
    claims = {str(n): judged[1]["least"] for n in range(9)}
    figure = draw(found, Dots("best"), claims=claims)
    assert legible.find_faults(figure) == []
    assert figure.axes[0].bbox.height > 40


def test_a_record_holds_what_only_a_picture_needs(monkeypatch):
    monkeypatch.setattr(table_records.code, "of_reduction", lambda reduce: "")
    fields = np.random.default_rng(0).normal(size=(1, 64, 128))
    fields[0, 0, 0] = np.nan
    held = xr.DataArray(fields, {"row": ["a"], "y": range(64), "x": range(128)})
    found = table_of(["a"], best=[1.0]).assign(field=packing.pack(held))
    result = result_of(found, Map("field"))
    content = json.loads(json.dumps(table_records.to_json(result)))
    assert [*content["cells"]] == ["a.best"]
    record = table_records.Record(result.table, "cpu", content)
    again = packing.unpack(table_records.to_dataset(record))
    np.testing.assert_allclose(again["field"], fields, atol=1e-4)
    one, other = (
        drawing.draw(each).axes[0].images[0].get_array()
        for each in (result, table_records.to_result(record))
    )
    np.testing.assert_array_equal(one, other)
    large = packing.pack(xr.DataArray(np.zeros((1, 300, 100)), dims=("row", "y", "x")))
    much = found.drop_vars(("field", "x", "y")).assign(field=large)
    with pytest.raises(ConfigError, match=r"60000 bytes: \['field'\] take 80\d+; thin"):
        table_records.to_json(result_of(much, Map("field")))


def test_fields_on_one_scale_and_their_errors():
    fields = np.linspace(0, 1, 24).reshape(2, 3, 4)
    held = xr.DataArray(fields, {"row": ["truth", "ours"]}, ("row", "lat", "lon"))
    found = packing.pack(held).to_dataset(name="field")
    figure = draw(found, Map("field", "truth", y="lat", x="lon"), {"field": "K"})
    shown = [axes.images[0] for axes in figure.axes if axes.images and axes.get_title()]
    truth, ours, error = shown
    assert truth.get_clim() == ours.get_clim()
    np.testing.assert_allclose(truth.get_clim(), (0, 1), atol=0.03)
    np.testing.assert_allclose(error.get_array(), fields[1] - fields[0], atol=1e-4)
    low, high = error.get_clim()
    assert low == -high
    assert error.axes.get_title() == "ours - truth"


@pytest.fixture
def judged():
    """A table of which one claim holds and one fails."""
    found = table_of(["ours", "sgd", "another"], best=[1.0, 2.0, 3.0])
    number = reduce.cell("best", "ours")
    claims = {
        "less": number.at_most(1.5, "ours is less").fails({"ours": "sgd"}),
        "least": number.at_most(0.5, "ours is least"),
    }
    return found, claims


def test_what_claims_are_about_is_told_from_controls_and_others(judged):
    found, claims = judged
    for picture in (Dots("best"), Scatter("best", "best")):
        (axes,) = draw(found, picture, claims=claims).axes
        ours, control, other = axes.get_lines()[:3]
        assert ours.get_color() == control.get_color() != other.get_color()
        assert control.get_markerfacecolor() == "none" != ours.get_markerfacecolor()
        assert names_of(axes.figure) == ["in the claims", "negative control", "others"]
    (axes,) = draw(found, Bars("best"), claims=claims).axes
    assert [bool(bar.get_hatch()) for bar in axes.patches] == [False, True, False]
    assert [bar.get_facecolor()[-1] for bar in axes.patches] == [1, 0, 0]
    (axes,) = draw(found, Dots("best", about="another"), claims=claims).axes
    assert axes.get_lines()[2].get_color() == curves.COLOURS[0]


def test_a_control_that_another_claim_is_about_is_one_where_the_picture_says_so():
    """As a rule without a condition, of which a claim is that it is wrong."""
    found = table_of(["rule", "broken"], best=[0.0, 9.0])
    claims = {
        "no": reduce.cell("best", "rule").at_most(0, "no").fails({"rule": "broken"}),
        "some": reduce.cell("best", "broken").at_least(1, "").fails({"broken": "rule"}),
    }
    (axes,) = draw(found, Dots("best", about="rule"), claims=claims).axes
    assert names_of(axes.figure) == ["in the claims", "negative control"]


def test_what_hatching_tells_apart_can_be_seen():
    """On a face of its own colour it cannot."""
    looks = [panels.look_of_part(place) for place in range(len(panels.HATCHES))]
    assert [look["facecolor"] == "none" for look in looks] == [False, *[True] * 6]
    assert len({look["hatch"] for look in looks}) == len(looks)


@pytest.mark.parametrize(("bound", "word"), [("less", "≤ 1.5"), ("least", "≤ 0.5")])
def test_a_bound_and_a_claim_that_fails_are_seen(judged, bound, word):
    found, claims = judged
    figure = draw(found, Dots("best", bound=bound), claims=claims)
    (axes,) = figure.axes
    line = axes.get_lines()[0]
    assert line.get_xdata()[0] == float(word[2:])
    fails = " FAILS" * (bound == "least")
    assert [text.get_text() for text in axes.texts] == [word + fails]
    assert axes.get_xlim()[0] < float(word[2:])
    assert (line.get_color() == "#000000") == (bound == "less")
    said = figure.get_suptitle()
    assert said == "1 of 2 claims FAIL:\nours is least: 1, bound ≤ 0.5"
    del claims["least"]
    found = found.assign_coords(row=["ours", "sgd", "P=2"])
    figure = draw(found, Lines("P={}", "best", bound="less"), claims=claims)
    assert figure.get_suptitle() == "the claim holds"
    assert figure.axes[0].texts[0].get_text() == "≤ 1.5"


def test_a_claim_whose_control_passes_says_so(judged):
    found, claims = judged
    both = {"less": claims["less"].fails({"ours": "ours"})}
    result = result_of(found, Dots("best"), claims=both)
    for said in (drawing.draw(result).get_suptitle(), pictures.describe(result)):
        assert "1, bound ≤ 1.5 (kept, but by a control too" in said


def test_a_picture_in_words(judged):
    found, claims = judged
    said = pictures.describe(result_of(found, Dots("best"), claims=claims))
    assert said == (
        "A title. Dots of best loss. holds: ours is less: 1, bound ≤ 1.5. FAILS: ours "
        "is least: 1, bound ≤ 0.5."
    )


def test_a_function_draws_what_kinds_cannot(judged):
    figure = Figure()
    assert draw(judged[0], lambda dataset: figure) is figure


@pytest.mark.parametrize(
    ("picture", "words"),
    [
        (Dots("lost"), r"columns \['lost'\]: there are \['best'\]"),
        (Lines("depth", "best"), r"dimensions \['depth'\]: there are"),
        (Map("best"), r"dimensions \('row', 'y', 'x'\): best has \('row',\)"),
        (Lines("P={}", "best"), r"no row has a number as 'P=\{\}' says: got \['ours'"),
        (Lines("row", "best"), r"dimensions \['row'\]: there are"),
        (Dots("best", rows="sgb"), r"rows \['sgb'\]: there are \['ours', 'sgd'"),
        (Dots("best", about="sgb"), r"rows \['sgb'\]: there are"),
    ],
)
def test_what_a_table_lacks_is_refused(judged, picture, words):
    with pytest.raises(ConfigError, match=words):
        draw(judged[0], picture)


def test_columns_that_are_no_numbers_of_rows_are_refused():
    held = {"name": ("row", ["x"]), "unit": ((), 1.0)}
    found = xr.Dataset(held, coords={"row": ["a"]})
    with pytest.raises(ConfigError, match=r"draws numbers: name has \['x'\]"):
        draw(found, Bars("name"))
    with pytest.raises(ConfigError, match=r"dimensions \('row',\): unit has \(\)"):
        draw(found, Dots("unit"))


def test_names_that_are_known_are_refused_before_anything_runs(judged):
    made = result_of(judged[0], Dots("best"), claims=judged[1]).table
    said = {"reduce": None, "columns": {"best": "best"}}
    dataclasses.replace(made, **said)
    with pytest.raises(ConfigError, match=r"columns \['lost'\]: there are \['best'\]"):
        dataclasses.replace(made, **said, picture=Dots("lost"))
    with pytest.raises(ConfigError, match=r"claims \['no'\]: there are"):
        dataclasses.replace(made, picture=Dots("best", bound="no"))


def test_what_cannot_be_read_is_found():
    figure = Figure(figsize=(14, 3))
    axes = figure.subplots()
    axes.set(xticks=[0, 0.001], xlim=(0, 1))
    axes.plot([0], [0], "o", color="r", label="a")
    axes.plot([0], [0], "o", color="b", label="b")
    axes.text(1, 0.5, "far away" * 9, fontsize=30)
    words = {fault.split(":")[0] for fault in legible.find_faults(figure)}
    assert words == {"small", "cut", "overlap", "alike"}


RECORDS = list(table_records.find_records(ROOT))


def fault_of(records):
    """Returns what cannot be read, of tables that have chosen their picture."""
    found = {}
    for record in records:
        figure = drawing.draw(table_records.to_result(record))
        faults = legible.find_faults(figure) if figure else ["nothing is drawn"]
        found |= {record.table.id: faults} if faults else {}
    return found


def test_every_committed_table_says_what_its_picture_is():
    tables = [record.table for record in RECORDS]
    assert [table.id for table in tables if not (table.picture and table.shows)] == []


def test_pictures_of_committed_tables_can_be_read():
    assert fault_of(RECORDS[::20]) == {}


@pytest.mark.slow
def test_pictures_of_all_committed_tables_can_be_read():
    assert fault_of(RECORDS) == {}
