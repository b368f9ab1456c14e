import csv
import dataclasses
import html
import io
import math

import numpy as np
import pytest
import rich.console
import xarray as xr

from hpcjax.core import ConfigError
from hpcjax.runs import render, table_records
from hpcjax.runs.claims import Control, Trivial
from hpcjax.runs.reduce import Number, cell, least
from hpcjax.runs.tables import (
    Claim,
    Runs,
    Table,
    TableResult,
    Tier,
    find_claimed,
    judge,
)


def values(**cells):
    return xr.Dataset(
        {name: ("row", list(column)) for name, column in cells.items()},
        coords={"row": ["a", "b"]},
    )


def table_of(dataset, claims, **options):
    tier = Tier(runs={}, claims=claims, minutes=0.0, **options)
    table = Table(
        id="paper/t",
        title="t",
        paper="Table 1",
        tiers={"cpu": tier},
        reduce=lambda rows: dataset,
        columns={"ratio": "ratio"},
    )
    return TableResult(
        table=table,
        tier="cpu",
        dataset=dataset,
        verdicts=judge(tier, dataset),
        runs=(),
        tuned={},
        at_edge={},
        rows={},
    )


RATIO = Number(lambda table: table["ratio"].sel(row="a").item())
CLAIM = RATIO.at_most(0.9, "a over b")


@pytest.mark.parametrize(
    ("ratio", "holds"),
    [
        ([0.8, 1.0], True),
        # The claim is met, but so it is by what must not meet it.
        ([0.8, 0.85], False),
        ([0.95, 1.0], False),
        # Nobody knows whether it would be.
        ([0.8, math.nan], False),
        ([0.8, math.inf], True),
    ],
)
def test_a_claim_holds_if_its_negative_control_fails(ratio, holds):
    made = table_of(values(ratio=ratio), {"c": CLAIM.fails({"a": "b"})})
    (verdict,) = made.verdicts
    assert verdict.holds == holds
    assert verdict.ours == ratio[0]
    assert verdict.broken == pytest.approx((ratio[1],), nan_ok=True)
    (shown,) = render.verdicts(made.verdicts)["must not hold for"]
    assert shown.startswith("b (")


def test_a_control_without_a_row_of_the_table_lets_no_claim_hold():
    for rows in ({"a": "c"}, {"c": "a"}):
        (verdict,) = table_of(
            values(ratio=[0.8, 1.0]), {"c": CLAIM.fails(rows)}
        ).verdicts
        assert math.isnan(*verdict.broken)
        assert not verdict.holds


@pytest.mark.parametrize(
    ("other", "holds"), [([1.0, 0.95], True), ([0.8, 1.0], False), ([1.0, 0.8], False)]
)
def test_a_claim_holds_if_all_its_negative_controls_fail(other, holds):
    columns = ({"ratio": "second"}, {"ratio": "third"})
    claim = CLAIM
    for each in columns:
        claim = claim.fails(columns=each)
    dataset = values(ratio=[0.5, 2], second=[other[0]] * 2, third=[other[1]] * 2)
    made = table_of(dataset, {"c": claim})
    assert made.verdicts[0].holds is holds
    (shown,) = render.verdicts(made.verdicts)["must not hold for"]
    assert shown == f"second ({other[0]:g}); third ({other[1]:g})"


def test_one_call_names_several_controls():
    claim = CLAIM.fails({"a": "b"}, {"b": "a"}, only=("ratio",))
    assert claim.controls == tuple(
        Control(rows=each, only=("ratio",)) for each in ({"a": "b"}, {"b": "a"})
    )


@pytest.mark.parametrize(
    ("ratio", "largest", "learned"),
    [
        ([0.4, 0.5, 0.9, 0.5], False, True),
        ([0.4, 0.6, 0.9, 0.5], False, False),
        ([0.4, math.nan, 0.9, 0.5], False, False),
        ([0.4, 0.9, 0.5, 0.9], True, True),
        ([0.4, 0.8, 0.5, 0.9], True, False),
    ],
)
def test_claims_about_a_peer_that_a_trivial_row_beats_fail(ratio, largest, learned):
    table = xr.Dataset(
        {"ratio": ("row", ratio)}, coords={"row": ["ours", "peer", "idle", "simple"]}
    )
    trivial = Trivial(
        rows=("idle", "simple"), by="ratio", peers=("peer",), largest=largest
    )
    peer = (cell("ratio", "ours") / cell("ratio", "peer")).at_most(0.9, "of the peer's")
    claims = {
        "peer": peer,
        "own": cell("ratio", "ours").at_most(0.45, "r"),
        "all": least("ratio", "ours", "simple").at_most(0.45, "r"),
    }
    made = table_of(table, claims, trivial=trivial)
    about, own, every = made.verdicts
    assert about.holds is learned
    assert own.holds
    assert every.holds
    assert about.unlearned == (() if learned else ("peer",))
    best = 0.9 if largest else 0.5
    told = f"Strongest trivial row: simple, ratio {best}"
    told += "" if learned else "; peer is worse: peer has not learned"
    assert render.describe_trivial(made) == told
    output = io.StringIO()
    rich.console.Console(file=output, width=500).print(render.render_table(made))
    assert told in output.getvalue()
    assert ("FAILS: peer has not learned" in output.getvalue()) is not learned


@pytest.mark.parametrize("by", ["ratio", "a column that an old record lacks"])
def test_without_a_cell_of_each_trivial_row_no_peer_has_learned(by):
    table = values(ratio=[0.4, 0.5])
    trivial = Trivial(rows=("b", "c"), by=by, peers=("a",))
    made = table_of(table, {"c": CLAIM}, trivial=trivial)
    assert not made.verdicts[0].holds
    assert "unknown" in render.describe_trivial(made)


def test_a_control_takes_rows_or_columns_or_some_columns_of_rows():
    table = values(ratio=[0.8, 1.0], other=[3.0, 4.0])

    def made(*rows, **options):
        (control,) = CLAIM.fails(*rows, **options).controls
        changed = control.apply(table)
        return changed["ratio"].values.tolist(), changed["other"].values.tolist()

    assert made({"a": "b"}) == ([1.0, 1.0], [4.0, 4.0])
    assert made({"a": "b", "b": "a"}) == ([1.0, 0.8], [4.0, 3.0])
    assert made({"a": "b"}, only=("other",)) == ([0.8, 1.0], [4.0, 4.0])
    assert made(columns={"ratio": "other"}) == ([3.0, 4.0], [3.0, 4.0])
    assert table["ratio"].values.tolist() == [0.8, 1.0]


@pytest.mark.parametrize(
    ("ours", "at_most", "at_least", "holds"),
    [
        (0.8, 0.85, None, True),
        (0.85, 0.85, None, True),
        (0.9, 0.85, None, False),
        (3.0, None, 2.0, True),
        (1.0, None, 2.0, False),
        (math.nan, 0.85, None, False),
        (math.nan, None, 2.0, False),
        (math.inf, 0.85, None, False),
    ],
)
def test_a_claim_is_a_number_and_a_bound(ours, at_most, at_least, holds):
    claim = Claim(relation="r", ours=lambda t: ours, at_most=at_most, at_least=at_least)
    assert claim.holds(ours) is holds


@pytest.mark.parametrize("bounds", [{}, {"at_most": 1.0, "at_least": 0.0}])
def test_a_claim_has_exactly_one_bound(bounds):
    with pytest.raises(ConfigError, match="exactly one"):
        Claim(relation="r", ours=lambda t: 0.0, **bounds)


def test_a_claim_on_a_missing_cell_fails():
    claim = Claim(
        relation="r", ours=lambda t: t["ratio"].sel(row="c").item(), at_most=9.0
    )
    result = table_of(values(ratio=[1.0, 2.0]), {"c": claim})
    assert not result.passed
    assert math.isnan(result.verdicts[0].ours)


@pytest.mark.parametrize(
    ("read", "ours"),
    [
        (np.nanmax, math.nan),
        (lambda ratio: (ratio > 1.0).sum(), math.nan),
        (lambda ratio: (ratio == 2.0).sum(), math.nan),  # as in choosing rows
        (lambda ratio: ratio[:2].sum(), 3.0),
    ],
)
def test_a_claim_that_reads_a_missing_cell_has_no_number(read, ours):
    claim = Claim(relation="r", ours=lambda t: read(t["ratio"].values), at_most=9.0)
    table = xr.Dataset({"ratio": ("row", [1.0, 2.0, math.nan])}, {"row": [*"abc"]})
    (verdict,) = table_of(table, {"c": claim}).verdicts
    assert verdict.ours == pytest.approx(ours, nan_ok=True)
    assert verdict.holds == (not math.isnan(ours))


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t["ours"][1] > t["ours"][2],
        lambda t: t["ours"][2] > t["ours"][1],
        lambda t: (t["ours"] > t["theirs"]).sum(),
        lambda t: (t["theirs"] > t["ours"]).sum(),
        lambda t: ((t["theirs"] > t["ours"]) & (t["ours"] < 0)).sum(),
        lambda t: ((t["ours"] > t["theirs"]) & (t["theirs"] > 0)).sum(),
    ],
)
def test_a_claim_that_compares_missing_cells_has_no_number(read):
    cells = {name: ("row", [2.0, math.nan, math.nan]) for name in ("ours", "theirs")}
    claim = Claim(relation="r", ours=read, at_most=0.0)
    (verdict,) = table_of(xr.Dataset(cells, {"row": [*"abc"]}), {"c": claim}).verdicts
    assert math.isnan(verdict.ours)


def test_a_claim_without_a_number_is_about_no_column():
    claims = {
        name: Claim(relation="r", ours=ours, at_most=9.0)
        for name, ours in {
            "read": lambda t: t["ratio"].sum(),
            "missing": lambda t: t["absent"].sum(),
        }.items()
    }
    tier = Tier(runs={}, claims=claims, minutes=1.0)
    table = values(ratio=[1.0, 2.0], other=[1.0, 2.0])
    assert find_claimed(tier, table) == {"ratio"}


def test_tuning_seeds_are_not_reported():
    with pytest.raises(ConfigError, match=r"both hold \[0\]"):
        Runs(config="a/b", seeds=(0, 1), tune_seeds=(0,), tune={"lr": ("1",)})


def test_trials_are_the_product_of_the_axes():
    runs = Runs(config="a/b", tune={"lr": ("1", "2"), "wd": ("0", "3")})
    assert len(runs.trials()) == 4
    assert {"lr": "2", "wd": "0"} in runs.trials()
    assert Runs(config="a/b").trials() == [{}]


@pytest.mark.parametrize("form", ["md", "csv", "html", "latex"])
def test_every_form_shows_values_and_verdicts(form):
    claim = Claim(relation="less", ours=lambda t: 0.5, at_most=0.85)
    text = render.render_table(
        table_of(values(ratio=[0.5, math.inf]), {"c": claim}), form
    )
    for word in ("0.5", r"$\infty$" if form == "latex" else "∞", "less", "holds"):
        assert word in text


HOSTILE = r"[bold] a & b_% #1 $x$ {c} ~ ^ \ | \| *d* `e` <f> :smile:"


def hostile(form):
    dataset = values(ratio=[0.5, 1.0]).assign_coords(row=[HOSTILE, 'a "q", b'])
    claim = Claim(relation=HOSTILE, ours=lambda t: 0.5, at_most=0.85)
    result = table_of(dataset, {"c": claim})
    table = dataclasses.replace(result.table, columns={"ratio": HOSTILE})
    return render.render_table(dataclasses.replace(result, table=table), form)


def test_text_is_not_read_as_markup_of_the_terminal():
    output = io.StringIO()
    rich.console.Console(file=output, width=500).print(hostile("rich"))
    assert output.getvalue().count(HOSTILE) == 3


def test_text_is_escaped_in_latex():
    text = hostile("latex")
    escaped = (
        r"{[}bold] a \& b\_\% \#1 \$x\$ \{c\} \textasciitilde \space "
        r"\textasciicircum \space \textbackslash \space | \textbackslash | *d* `e` <f>"
    )
    assert text.count(escaped) == 3
    assert r"0.5 ($\leq$ 0.85)" in text
    assert not set("∞≤≥") & set(text)


def test_text_is_escaped_in_markdown():
    lines = hostile("md").splitlines()
    escaped = r"[bold] a \& b\_% #1 $x$ {c} ~ ^ \\ \| \\\| \*d\* \`e\` \<f> :smile:"
    assert lines[0] == f"| row | {escaped} |"
    assert lines[2] == f"| {escaped} | 0.5 |"
    assert lines[-1] == f"| {escaped} | 0.5 (≤ 0.85) | holds |  |"


def test_text_is_escaped_in_html_and_csv():
    text = hostile("html")
    assert text.count(html.escape(HOSTILE, quote=False)) == 3
    rows = list(csv.reader(io.StringIO(hostile("csv"))))
    assert rows[:3] == [["row", HOSTILE], [HOSTILE, "0.5"], ['a "q", b', "1"]]


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [(0.4, 0.6, "0.5 [0.4, 0.6]"), (0.5, 0.5, "0.5"), (math.nan, math.nan, "0.5")],
)
def test_an_interval_is_shown_where_there_is_one(low, high, shown):
    table = table_of(
        values(ratio=[0.5, 1.0], ratio_low=[low, 1.0], ratio_high=[high, 1.0]), {}
    )
    printed = render.render_table(table, "csv").splitlines()
    assert next(csv.reader(printed[1:2]))[1] == shown


def test_comparison_with_a_committed_result():
    old = values(ratio=[0.5, 1.0], ratio_low=[0.4, 1.0], ratio_high=[0.6, 1.0])
    result = table_of(old.assign(count=("row", [1, 2])), {})
    cells = table_records.to_json(result)["cells"]

    def compared(**columns):
        made = result.dataset.assign({k: ("row", v) for k, v in columns.items()})
        return table_records.compare(made, cells, result.table)

    assert compared() == ()
    assert compared(ratio=[0.55, 1.0]) == ()
    assert compared(ratio=[0.7, 1.0]) == ("a.ratio: 0.7 outside [0.4, 0.6]",)
    assert compared(ratio=[0.3, 1.0]) == ("a.ratio: 0.3 outside [0.4, 0.6]",)
    assert compared(count=[1, 3]) == ("b.count: 3 instead of 2",)


def test_a_committed_missed_target_is_compared_as_a_word():
    result = table_of(values(ratio=[math.inf, 1.0]), {})
    cells = table_records.to_json(result)["cells"]
    assert table_records.compare(result.dataset, cells, result.table) == ()
    assert table_records.compare(values(ratio=[2.0, 1.0]), cells, result.table) == (
        "a.ratio: 2.0 instead of inf",
    )


@pytest.mark.parametrize(
    ("own", "first", "second", "source", "column"),
    [
        (None, "measured", "measured", "measured", None),
        (None, None, "measured", "unknown, measured", True),
        (None, "simulated", "simulated", "simulated", None),
        ("analytical", "measured", "measured", "analytical", None),
        # A `reduce` that joins rows hands on the attributes of the first.
        ("simulated", "simulated", "measured", "simulated, measured", True),
    ],
)
def test_how_figures_came_about(own, first, second, source, column):
    dataset = values(ratio=[0.5, 0.25]).assign_attrs({"source": own} if own else {})
    rows = {
        name: xr.Dataset(attrs={"source": way} if way else {})
        for name, way in (("a", first), ("b", second))
    }
    result = dataclasses.replace(table_of(dataset, {}), rows=rows)
    assert result.source == source
    shown = render.values(result)
    assert ("source" in shown) is bool(column)
    if column:
        assert shown["source"].tolist() == [first or "unknown", "measured"]
    assert table_records.to_json(result)["source"] == source


def test_the_edge_of_a_grid_is_shown():
    """Beyond the best trial's rate there might be a better one."""
    tune = {
        "lr": ("1e-1", "0.3", "0.03"),
        "schedule": ("constant", "cosine"),
        "wd": ("0.0",),
    }
    runs = Runs(config="paper/a", tune=tune)
    chosen = {"schedule": "constant", "wd": "0.0"}
    edges = {lr: runs.at_edge({"lr": lr, **chosen}) for lr in tune["lr"]}
    assert edges == {"1e-1": {}, "0.3": {"lr": "0.3"}, "0.03": {"lr": "0.03"}}
    result = table_of(values(ratio=[0.5, 1.0]), {})
    assert list(render.values(result)) == ["row", "ratio"]
    tuned = dataclasses.replace(result, at_edge={"b": edges["0.3"]})
    assert list(render.values(tuned)["at the edge of the grid"]) == ["", "lr=0.3"]
