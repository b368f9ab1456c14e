"""Monthly anomalies of the sea's surface temperature, real ones and made ones."""

import pathlib
from typing import TYPE_CHECKING

import numpy as np

from hpcjax.data import catalog

if TYPE_CHECKING:
    import xarray as xr

_WAVES = 8


def read_sst_anomaly(root: pathlib.Path) -> "xr.DataArray":
    """Returns the anomalies of 420 months, 1979 to 2013, [420, 48, 96] in K, float32.

    They are of a T30 grid; on land they are zero.

    Args:
      root: of the data sets.

    Raises:
      DataMissing: it is not there; the message says how to get it.
    """
    from hpcjax.data import weather

    path = catalog.locate("sst-anomaly", root)["ssta.nc"]
    return weather.open_fields(str(path))["ssta"].load()


def make_waves(months: int, latitudes: int, seed: int = 0) -> "xr.DataArray":
    """Returns a smooth field: a few waves that travel around the globe.

    Args:
      months: number of times.
      latitudes: of the grid, with twice as many longitudes.
      seed: of amplitudes, speeds and phases.

    Returns:
      Values [months, latitudes, 2 latitudes] of variance about 1, float32.
    """
    import xarray as xr

    rng = np.random.default_rng(seed)
    latitude = 90 - 180 * (np.arange(latitudes) + 0.5) / latitudes
    longitude = 180 * np.arange(2 * latitudes) / latitudes
    t, y, x = np.meshgrid(
        np.arange(months), np.deg2rad(latitude), np.deg2rad(longitude), indexing="ij"
    )
    total = np.zeros(t.shape)
    for wave in range(_WAVES):
        number, speed, phase = wave % 4, rng.normal(0, 0.15), rng.uniform(0, 6.3)
        # cos^k φ: as smooth at the poles as k waves around them.
        across = np.cos(y) ** number * np.cos(rng.integers(1, 3) * y + phase)
        total += across * np.cos(number * x + speed * t + 2 * phase)
    start = np.datetime64("1979-01", "M")
    axis = (start + np.arange(months)).astype("datetime64[ns]")
    dims = ("time", "latitude", "longitude")
    coords = {"time": axis, "latitude": latitude, "longitude": longitude}
    values = (total / np.sqrt(_WAVES / 4)).astype(np.float32)
    return xr.DataArray(values, coords, dims, "waves", {"units": "K"})
