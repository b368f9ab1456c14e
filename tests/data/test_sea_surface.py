"""Anomalies of the sea's surface: the file's form, and the made field's."""

import numpy as np
import pytest
import xarray as xr

from hpcjax import data
from hpcjax.core.errors import DataMissing


def test_the_file_is_read_with_the_houses_names(tmp_path):
    with pytest.raises(DataMissing, match="hpcjax data fetch sst-anomaly"):
        data.read_sst_anomaly(tmp_path)
    waves = data.make_waves(3, 4)
    (tmp_path / "sst-anomaly").mkdir()
    packaged = waves.rename("ssta").rename(latitude="lat", longitude="lon")
    packaged["lat"].attrs["units"] = "degrees_north"
    packaged["lon"].attrs["units"] = "degrees_east"
    packaged.to_netcdf(tmp_path / "sst-anomaly" / "ssta.nc", engine="h5netcdf")
    found = data.read_sst_anomaly(tmp_path)
    assert found.dims == ("time", "latitude", "longitude")
    assert np.array_equal(found, waves)


def test_waves_go_around_the_globe_and_are_smooth():
    waves = data.make_waves(24, 12, seed=1)
    assert waves.shape == (24, 12, 24)
    assert 0.3 < float(waves.std()) < 3
    turned = np.roll(waves.to_numpy(), 1, axis=2)
    step = np.abs(waves.to_numpy() - turned).max(axis=(0, 1))
    assert step[0] < 1.5 * np.median(step)  # where the globe closes as elsewhere
    xr.testing.assert_identical(waves, data.make_waves(24, 12, seed=1))
    assert not waves.equals(data.make_waves(24, 12, seed=2))
