"""Tables of speculative decoding: read off made-up runs whose figures are known."""

import math

import numpy as np
import pytest

from experiments.specdec import tables
from experiments.specdec.experiment import shares
from hpcjax import cost
from tests.experiments import rows
from tests.experiments.rows import verdicts

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
    run = rows.run(
        {
            "draft": ["small", "large"],
            "sampling": ["greedy", "T = 1"],
            "ahead": AHEADS,
            "pass": list(VERIFY),
        },
        measured=("draft sampling ahead", tokens / seconds / slower),
        tokens=("draft sampling ahead", tokens),
        expected=("draft sampling ahead", tokens),
        step=("draft sampling", STEP),
        verify=("pass", list(VERIFY.values())),
        other=("sampling ahead", np.full((2, 2), OTHER)),
        plain=("sampling", [0.1, 0.1]),
    )
    return {"all": run}


def test_iterations_are_the_sum_of_their_parts():
    table = tables.MODEL.reduce(run_of())
    own = table.sel(row="large, 4 ahead, T = 1")
    assert float(own["milliseconds"]) == pytest.approx(1e3 * (4 * 4 + 14 + 0.5))
    assert float(own["foretold"]) == pytest.approx(3.25 / 30.5)
    assert float(own["beforehand"]) == pytest.approx(10 * 3.25 / 30.5)
    np.testing.assert_allclose(table["ratio"], 1)
    found = verdicts(tables.MODEL, table)
    assert found["foretold"].ours == found["chosen"].ours == 1
    # The best is the small draft with four tokens: 3 in 18.5 s against 1 in 10.
    best = int(np.argmax(table["beforehand"].values))
    assert table["row"].values[best] == "small, 4 ahead, greedy"


def test_a_wrong_model_and_a_wrong_choice_fail():
    found = verdicts(tables.MODEL, tables.MODEL.reduce(run_of(slower=1.2)))
    assert found["foretold"].ours == 0
    assert not found["foretold"].holds
    # Too good to be true by other prompts: it is chosen, and is slow.
    runs = run_of()
    runs["all"]["expected"].loc[{"draft": "large", "ahead": 1}] = 9.0
    chosen = verdicts(tables.MODEL, tables.MODEL.reduce(runs))["chosen"]
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
    run = rows.run(
        seconds=("point repetition", np.repeat(seconds[:, None], 3, 1)),
        **{name: ("point", values) for name, values in columns.items()},
    )
    return {"all": run}


def test_the_fit_is_of_the_grid_and_judged_on_the_line():
    table = tables.DEPTH_WIDTH.reduce(latencies(1.0))
    assert "equal parameters: 16 x 64" in table["row"]
    found = verdicts(tables.DEPTH_WIDTH, table)
    assert found["r_squared"].ours == pytest.approx(1)
    assert found["line"].ours == pytest.approx(0, abs=1e-6)
    assert all(each.holds for name, each in found.items() if name != "monotone")
    found = verdicts(tables.DEPTH_WIDTH, tables.DEPTH_WIDTH.reduce(latencies(1.3)))
    assert found["line"].ours == pytest.approx(1 - 1 / 1.3)
    assert not found["line"].holds
    falling = tables.DEPTH_WIDTH.reduce(latencies(np.array([4.0, 2.0, 1.0, 0.5])))
    assert not verdicts(tables.DEPTH_WIDTH, falling)["monotone"].holds


def test_speed_ups_are_medians_with_intervals():
    run = rows.run(
        {"rate": [0.6, 0.7]},
        ahead=("rate", [3, 4]),
        foretold=("rate", [1.6, 2.0]),
        tokens=("rate", [2.2, 2.8]),
        measured=("rate repetition", [[1.5] * 5, [1.7, 1.8, 1.9, 2, 2.1]]),
        plain=("repetition", [4e-3, 5e-3, 5.2e-3, 4.9e-3, 5e-3]),
    )
    table = tables.SPEEDUP.reduce({"all": run})
    own = table.sel(row="0.7 accepted")
    assert float(own["measured"]) == 1.9
    assert 1.7 <= float(own["measured_low"]) <= float(own["measured_high"]) <= 2.1
    found = verdicts(tables.SPEEDUP, table)
    assert found["foretold"].ours == pytest.approx(2 / 1.9 - 1)
    assert found["speedup"].ours == pytest.approx(1.9)
    assert all(each.holds for each in found.values())
    # A slow baseline does not help.
    slow = tables.SPEEDUP.reduce({"all": run.assign(plain=2 * run["plain"])})
    found = verdicts(tables.SPEEDUP, slow)["speedup"]
    assert found.ours == pytest.approx(1.9 * 5.1 / 10)
    assert not found.holds


def test_shares_give_back_the_tokens_of_an_iteration():
    counts = np.array([3, 2, 0, 5])
    wanted = 1 + np.cumprod(shares(counts)).sum()
    assert cost.tokens_of_counts(counts) == pytest.approx(wanted)
    assert shares(np.array([4, 0, 0])).tolist() == [0, 0]
    assert math.isclose(cost.tokens_of_counts(counts, 1), 1.7)
