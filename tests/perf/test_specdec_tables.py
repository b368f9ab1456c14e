"""Tables of speculative decoding: read off made-up runs whose figures are known."""

import math

import numpy as np
import pytest
import xarray as xr

from experiments.specdec import tables
from experiments.specdec.experiment import expected_tokens, shares
from hpcjax import perf
from hpcjax.runs.tables import judge


def verdicts(table, tier, dataset):
    return {each.name: each for each in judge(table.tier(tier), dataset)}


STEP, OTHER, AHEADS = np.array([[1.0, 2.0], [3.0, 4.0]]), 0.5, [1, 4]
VERIFY = {1: 10.0, 2: 11.0, 5: 14.0}


def run_of(slower=1.0):
    """Two drafts; every rate is the model's, divided by `slower`."""
    shape = (2, 2, 2)
    tokens = np.stack([np.full((2, 2), 1.5), np.full((2, 2), 3.0)], axis=-1)
    tokens[1] += 0.25
    seconds = np.empty(shape)
    for draft, sampling, at in np.ndindex(*shape):
        ahead = AHEADS[at]
        seconds[draft, sampling, at] = (
            ahead * STEP[draft, sampling] + VERIFY[ahead + 1] + OTHER
        )
    axes = ("draft", "sampling", "ahead")
    run = xr.Dataset(
        {
            "measured": (axes, tokens / seconds / slower),
            "tokens": (axes, tokens),
            "expected": (axes, tokens),
            "step": (("draft", "sampling"), STEP),
            "verify": ("pass", list(VERIFY.values())),
            "other": (("sampling", "ahead"), np.full((2, 2), OTHER)),
            "plain": ("sampling", [0.1, 0.1]),
        },
        coords={
            "draft": ["small", "large"],
            "sampling": ["greedy", "T = 1"],
            "ahead": AHEADS,
            "pass": list(VERIFY),
        },
    )
    return {"all": run.expand_dims(seed=[0])}


def test_iterations_are_the_sum_of_their_parts():
    table = tables.MODEL.reduce(run_of())
    own = table.sel(row="large, 4 ahead, T = 1")
    assert float(own["milliseconds"]) == pytest.approx(1e3 * (4 * 4 + 14 + 0.5))
    assert float(own["foretold"]) == pytest.approx(3.25 / 30.5)
    assert float(own["beforehand"]) == pytest.approx(10 * 3.25 / 30.5)
    np.testing.assert_allclose(table["ratio"], 1)
    found = verdicts(tables.MODEL, "cpu", table)
    assert found["foretold"].ours == found["chosen"].ours == 1
    # The best is the small draft with four tokens: 3 in 18.5 s against 1 in 10.
    best = int(np.argmax(table["beforehand"].values))
    assert table["row"].values[best] == "small, 4 ahead, greedy"


def test_a_wrong_model_and_a_wrong_choice_fail():
    found = verdicts(tables.MODEL, "cpu", tables.MODEL.reduce(run_of(slower=1.2)))
    assert found["foretold"].ours == 0
    assert not found["foretold"].holds
    # Too good to be true by other prompts: it is chosen, and is slow.
    rows = run_of()
    rows["all"]["expected"].loc[{"draft": "large", "ahead": 1}] = 9.0
    chosen = verdicts(tables.MODEL, "cpu", tables.MODEL.reduce(rows))["chosen"]
    best, taken = 3 / (4 * 2 + 14.5), 1.75 / (4 + 11.5)
    greedy = (1.75 / (3 + 11.5)) / (3 / (4 + 14.5))
    assert chosen.ours == pytest.approx(min(greedy, taken / best))
    assert not chosen.holds


def latencies(line):
    """A grid that follows the model to the letter; `line` changes the other drafts."""
    depths, widths = (2, 4, 8, 16), (64, 128, 256)
    points = [(d, w, False) for d in depths for w in widths]
    points += [(d, w, True) for d, w in zip(depths, (256, 192, 128, 64), strict=True)]
    depth, width, own = (np.array(values) for values in zip(*points, strict=True))
    layer, head = 48.0 * width**2, 4e3 * width
    seconds = 1e-4 * depth + 1e-10 * (depth * layer + head) + 1e-3
    seconds[own] *= line
    columns = {"depth": depth, "width": width, "line": own}
    columns |= {"layer_bytes": layer, "head_bytes": head}
    run = xr.Dataset({name: ("point", values) for name, values in columns.items()})
    run["seconds"] = (("point", "repetition"), np.repeat(seconds[:, None], 3, 1))
    return {"all": run.expand_dims(seed=[0])}


def test_the_fit_is_of_the_grid_and_judged_on_the_line():
    table = tables.DEPTH_WIDTH.reduce(latencies(1.0))
    assert "equal parameters: 16 x 64" in table["row"]
    found = verdicts(tables.DEPTH_WIDTH, "gpu", table)
    assert found["layer"].ours == pytest.approx(100)
    assert found["r_squared"].ours == pytest.approx(1)
    assert found["line"].ours == pytest.approx(0, abs=1e-6)
    assert all(each.holds for each in found.values() if each.name != "monotone")
    found = verdicts(
        tables.DEPTH_WIDTH, "cpu", tables.DEPTH_WIDTH.reduce(latencies(1.3))
    )
    assert found["line"].ours == pytest.approx(1 - 1 / 1.3)
    assert not found["line"].holds
    falling = tables.DEPTH_WIDTH.reduce(latencies(np.array([4.0, 2.0, 1.0, 0.5])))
    assert not verdicts(tables.DEPTH_WIDTH, "gpu", falling)["monotone"].holds


def test_speed_ups_are_medians_with_intervals():
    run = xr.Dataset(
        {
            "ahead": ("rate", [3, 4]),
            "foretold": ("rate", [1.6, 2.0]),
            "tokens": ("rate", [2.2, 2.8]),
            "measured": (("rate", "repetition"), [[1.5] * 5, [1.7, 1.8, 1.9, 2, 2.1]]),
            "plain": ("repetition", [4e-3, 5e-3, 5.2e-3, 4.9e-3, 5e-3]),
        },
        coords={"rate": [0.6, 0.7]},
    )
    table = tables.SPEEDUP.reduce({"all": run.expand_dims(seed=[0])})
    own = table.sel(row="0.7 accepted")
    assert float(own["measured"]) == 1.9
    assert 1.7 <= float(own["measured_low"]) <= float(own["measured_high"]) <= 2.1
    found = verdicts(tables.SPEEDUP, "gpu", table)
    assert found["foretold"].ours == pytest.approx(2 / 1.9 - 1)
    assert found["plain"].ours == pytest.approx(5.0)
    assert all(each.holds for each in found.values())


def test_shares_give_back_the_tokens_of_an_iteration():
    counts = np.array([3, 2, 0, 5])
    assert expected_tokens(shares(counts), 3) == pytest.approx(
        perf.tokens_of_counts(counts)
    )
    assert shares(np.array([4, 0, 0])).tolist() == [0, 0]
    assert math.isclose(expected_tokens(shares(counts), 1), 1.7)
