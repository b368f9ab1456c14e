"""Steps of networks in blocks, small ones, and the claims of the table."""

import dataclasses

import numpy as np
import pytest
import xarray as xr

from configs.hybrid3dcnn import equal as configs
from experiments.hybrid3dcnn import equal, equal_tables
from hpcjax.data import PhantomVolumesConfig
from hpcjax.models import VolumeUNetConfig, _volume_unet
from hpcjax.runs.tables import judge
from hpcjax.sharding import SpatialConfig

CUBE = SpatialConfig(depth=2, height=2, width=2)
SMALL = dataclasses.replace(
    configs.unet,
    model=VolumeUNetConfig(width_divisor=16, sync_axis="data"),
    dataset=PhantomVolumesConfig(patients=4, depth=8, size=8),
    parallel=CUBE,
    batch=1,
    steps=2,
)


@pytest.fixture
def shallow(monkeypatch):
    """The U-Net has one of its levels, and the one below: half a minute less."""
    monkeypatch.setattr(_volume_unet, "_DOWN", _volume_unet._DOWN[:2])


@pytest.mark.acceptance("hybrid3dcnn", 4)
def test_the_unet_in_blocks_learns_what_one_device_learns(shallow):
    found = equal.run(SMALL)
    assert found["loss"] <= 1e-5
    assert found["gradient"] <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["statistics", "corners"])
def test_without_a_neighbours_part_it_does_not(shallow, broken):
    cfg = dataclasses.replace(SMALL, broken=broken)
    found = equal.run(cfg)
    assert found["loss"] > 1e-5
    assert found["gradient"] > 1e-4


@pytest.mark.acceptance("hybrid3dcnn", 9)
def test_the_layer_that_cannot_be_cut_is_told():
    volumes = PhantomVolumesConfig(patients=4, depth=32, size=8)
    cut = SpatialConfig(depth=8)
    cfg = dataclasses.replace(SMALL, dataset=volumes, parallel=cut)
    assert equal.run(dataclasses.replace(cfg, refused="pool_2"))["told"] == 1.0


def test_claims_fail_for_what_is_left_out():
    def row(loss, gradient, told=0.0):
        cells = {"loss": loss, "gradient": gradient, "told": told}
        return xr.Dataset({name: ("seed", [cell]) for name, cell in cells.items()})

    rows = {name: row(1e-7, 1e-6) for name in equal_tables.COMPARED}
    rows |= {
        equal_tables.THIN: row(np.nan, np.nan, 1.0),
        equal_tables.OWN: row(1e-2, 0.5),
        equal_tables.CORNERLESS: row(1e-7, 1e-2),
    }
    tier = equal_tables.EQUAL.tier("cpu")
    found = judge(tier, equal_tables.EQUAL.reduce(rows))
    assert [each.holds for each in found] == [True] * 3
    rows[equal_tables.LARGE] = row(1e-7, 2e-4)
    found = judge(tier, equal_tables.EQUAL.reduce(rows))
    assert [each.name for each in found if not each.holds] == ["gradient"]
