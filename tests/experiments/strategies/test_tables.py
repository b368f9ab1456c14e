"""The claims of `strategies/zero` in small live runs, and with the mechanism broken."""

import types

import pytest

from experiments.strategies import tables, zero
from hpcjax import sharding
from hpcjax.core import ConfigError
from hpcjax.models import CausalLmConfig
from hpcjax.runs.tables import judge
from hpcjax.sharding import ZeroConfig

SMALL = {
    "model": CausalLmConfig(depth=2, width=32, heads=2),
    "context": 4,
    "memory": 2**20,
    "steps": 4,
}


def one_seed(**options):
    context = types.SimpleNamespace(mesh=sharding.data_mesh(8))
    made = zero.run(zero.Config(**SMALL, **options), context)
    return made.expand_dims(seed=[0])


@pytest.mark.slow
def test_stage_3_equals_one_device_and_summed_gradients_do_not():
    rows = {
        tables.DP: one_seed(),
        tables.ZERO3: one_seed(parallel=ZeroConfig()),
        tables.PEER: one_seed(annotated=True),
        tables.BROKEN: one_seed(parallel=ZeroConfig(), summed=True),
    }
    rows |= dict.fromkeys((tables.ZERO1, tables.ZERO2), rows[tables.ZERO3])
    table = tables.ZERO.reduce(rows)
    (equal,) = (v for v in judge(tables.ZERO.tier("cpu"), table) if v.name == "equal")
    assert equal.holds, equal
    held = {name: float(table["state"].sel(row=name)) for name in rows}
    assert held[tables.DP] == pytest.approx(3, rel=0.02)
    assert held[tables.ZERO3] == pytest.approx(0.375, rel=0.03)  # and the batch
    assert held[tables.PEER] == pytest.approx(0.375, rel=0.15)  # biases are whole
    assert float(table["depth"].sel(row=tables.ZERO3)) > table["depth"].sel(
        row=tables.DP
    )
    assert float(table["sent"].sel(row=tables.ZERO3)) == pytest.approx(3, rel=0.15)


def test_what_is_annotated_is_spread_by_its_annotations_alone():
    with pytest.raises(ConfigError, match="spread by its annotations"):
        zero.Config(annotated=True, parallel=ZeroConfig())
