"""PipeFisher's tables, made again from the published times."""

import functools
import math

import pytest

from experiments.pipefisher import experiment, tables
from tests.experiments.rows import verdicts


def figures(**changes):
    return figures_of(experiment.Config(**changes))


@functools.cache
def figures_of(cfg):
    return experiment.figures(cfg, experiment.simulate(cfg))


# Printed digits of utilization %, ratio, preconditioning % for D = 4, 8, 16; then the
# ratios of the large model.
GPIPE = [("57.1", "2.21", "3.7"), ("53.3", "1.51", "1.7"), ("51.6", "1.22", "0.8")]
CHIMERA = [("76.1", "5.28", "4.9"), ("68.0", "2.80", "2.2"), ("64.5", "2.09", "1.0")]
PRINTED = {
    "gpipe": (GPIPE, ("2.33", "1.58", "1.27")),
    "one_f_one_b": (GPIPE, ("2.33", "1.58", "1.27")),
    "chimera": (CHIMERA, ("5.58", "2.94", "2.18")),
}


@pytest.mark.acceptance("pipefisher", 3)
def test_the_bubble_fill_table_to_the_last_digit():
    rows = {}
    for schedule, expected in PRINTED.items():
        for stages, cells, ratio in zip((4, 8, 16), *expected, strict=True):
            for model in ("base", "large"):
                row = figures(model=model, schedule=schedule, stages=stages, blocks=1)
                found = (
                    f"{100 * row['utilization'].item():.1f}",
                    f"{row['ratio'].item():.2f}",
                    f"{100 * row['overhead'].item():.1f}",
                )
                assert found == cells if model == "base" else found[1] == ratio
                rows[f"{model} {schedule} D={stages}"] = row.expand_dims(seed=[0])
    # The table finds the same, and counts cells that differ.
    (verdict,) = verdicts(tables.BUBBLE_FILL, tables.BUBBLE_FILL.reduce(rows)).values()
    assert verdict.holds
    assert verdict.ours == 36
    rows["base gpipe D=4"] = rows["base gpipe D=4"] * 1.1
    (verdict,) = verdicts(tables.BUBBLE_FILL, tables.BUBBLE_FILL.reduce(rows)).values()
    assert verdict.ours == 33
    assert not verdict.holds


# Shares and periods of a simulation of the same rules that was made elsewhere.
FILLED = {
    ("base", 4, "gpipe"): ("88.7", 3, "88.7", 3),
    ("base", 4, "one_f_one_b"): ("88.7", 3, "80.8", 4),
    ("base", 4, "chimera"): ("97.2", 6, "90.1", 9),
    ("large", 8, "gpipe"): ("90.1", 2, "90.1", 2),
    ("large", 8, "one_f_one_b"): ("90.1", 2, "77.8", 3),
    ("large", 8, "chimera"): ("91.5", 4, "91.5", 4),
}


@pytest.mark.acceptance("pipefisher", 11)
def test_bubbles_become_as_full_as_the_relation_asks():
    rows = {}
    for (model, stages, schedule), expected in FILLED.items():
        of = {"model": model, "stages": stages, "schedule": schedule}
        row, whole = figures(**of), figures(**of, gate="device", panel=None)
        assert row["filled"] >= 0.85
        assert row["period"] <= math.ceil(row["ratio"].item()) + 1
        assert row["unplaced"] == 0
        step = row["t_pipe"] * (1 + row["overhead"].item())
        assert row["t_step"] == pytest.approx(step)
        found = (
            f"{100 * row['filled'].item():.1f}",
            row["period"].item(),
            f"{100 * whole['filled'].item():.1f}",
            whole["period"].item(),
        )
        assert found == expected
        rows[f"{model} {schedule}"] = row.expand_dims(seed=[0])
    # The table judges all of these rows, and fails when one of them does.
    assert list(rows) == tables.CLAIMED
    found = verdicts(tables.FILL, tables.FILL.reduce(rows))
    assert list(found) == ["utilization", "period", "step"]
    assert all(v.holds for v in found.values())
    worse = {"filled": 0.8, "period": 9, "unplaced": 1, "t_step": 1.0}
    last = tables.CLAIMED[-1]
    rows[last] = rows[last].assign(
        {column: rows[last][column] * 0 + value for column, value in worse.items()}
    )
    found = verdicts(tables.FILL, tables.FILL.reduce(rows))
    assert not any(v.holds for v in found.values())
