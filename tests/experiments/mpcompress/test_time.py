"""The table of codes between processes: its claims, costs, and a small live run."""

import types

import numpy as np
import pytest

from experiments.mpcompress import between, time_tables
from experiments.mpcompress.time_tables import ALL, EIGHT, FAST, LEARNT, SLOW, TOP
from hpcjax import cost
from hpcjax.core.errors import ConfigError
from hpcjax.runs import discover
from hpcjax.runs.tables import judge
from tests.conftest import REPOSITORY
from tests.experiments import rows

CFG = between.Config()
LABELS, LINKS = CFG.labels(), (SLOW, FAST)


def made(**cells):
    """The table by what a run should have, but for `{figure: {code + link: value}}`."""

    def figure(name, likely, **usual):
        own = usual | cells.get(name, {})
        return [
            [own.get(code + link, likely) for code in between.CODES] for link in LINKS
        ]

    wire = np.array([CFG.wire(code) for code in between.CODES])
    costs = cost.CodedCosts(1e-11, 8e-8, 1e-8, 1e-4)
    speedup = cells.get("speedup", [between.scale(costs, way) for way in between.WAYS])
    seconds = figure("seconds", 1.0, **{LEARNT + SLOW: 0.3})
    saved = [(wire[0] - wire).sum(1) / rate for rate in between.LINKS.values()]
    own = {
        "up": figure("up", 1.0, **{between.PRETENDED + SLOW: 4.0}),
        "down": figure("down", 1.0),
        **{name: figure(name, 0.01) for name in ("passes", "encode", "decode")},
        "saved": saved,
    }
    run = rows.run(
        LABELS,
        seconds=("link code round", np.repeat(np.array(seconds)[..., None], 7, -1)),
        speedup=("link way width", [speedup] * 2),
        micro_batches=4,
        **{name: ("link code", values) for name, values in own.items()},
    )
    return time_tables.TIME.reduce({"codes": run})


def test_claims_fail_for_what_they_deny():
    tier = time_tables.TIME.tier("cpu")
    assert all(verdict.holds for verdict in judge(tier, made()))
    broken = made(
        seconds={LEARNT + SLOW: 0.6, LEARNT + FAST: 0.9, ALL + FAST: 0.89},
        encode={TOP + FAST: 0.003},
        up={EIGHT + FAST: 1 + 1e-6},
        speedup=[[1.1] * 4] * 2,
    )
    assert not any(claim.holds(claim.ours(broken)) for claim in tier.claims.values())
    assert np.isnan(time_tables._off(made(down={TOP + SLOW: np.nan})))


def test_costs_are_those_that_were_measured():
    """Seconds that were made of costs give these back."""
    operations = 32 * CFG.rows * CFG.width * CFG.hidden
    passes = {between.WITHOUT: 2e-11 * operations}
    passes[LEARNT] = passes[between.WITHOUT] + 3e-9 * CFG.rows * CFG.width
    found = between.fit(CFG, passes, [5e-5, 8e-8])
    np.testing.assert_allclose(found, (2e-11, 8e-8, 3e-9, 5e-5))
    assert between.fit(CFG, {**passes, LEARNT: 0.0}, [5e-5, 8e-8]).number == 0


@pytest.mark.wrong
@pytest.mark.parametrize(
    "fields", [{"rows": 0}, {"width": "8"}, {"width": 6}, {"patience": -1.0}]
)
def test_fields_that_are_none_are_told(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        between.Config(**fields)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.acceptance("mpcompress", 8)
def test_two_processes_send_what_codecs_say_and_the_slow_link_takes_its_time():
    """Bytes to the last, and no step is faster than its link lets bytes out."""
    small = CFG.smoke | {"rows": "128", "width": "256", "d": "12"}
    loaded = discover.load("mpcompress/time", small, REPOSITORY)
    cfg = loaded.config
    found = loaded.experiment.run(cfg, types.SimpleNamespace())
    honest = [code for code in between.CODES if code != between.PRETENDED]
    for way in ("up", "down"):
        assert (found[way].sel(code=honest) == 1).all()
    assert (found["up"].sel(code=between.PRETENDED) > 3.9).all()
    for link, rate in between.LINKS.items():
        seconds = found["seconds"].sel(link=link).min("round")
        for code in between.CODES:
            least = cfg.micro_batches * cfg.wire(code).max() / rate
            assert seconds.sel(code=code) > least
    slow, fast = (between.LINKS[link] for link in between.LINKS)
    saved = found["saved"].sel(code=LEARNT).values
    assert saved[0] == pytest.approx(saved[1] * fast / slow)
    assert (found["byte"] > 0.9 / np.array([slow, fast])).all()
