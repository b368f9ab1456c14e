"""Rain at Innsbruck, with the members of reforecasts: real ones, of a single place."""

import csv
import dataclasses
import io
import lzma
import pathlib
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from hpcjax.core import files
from hpcjax.core.config import AtLeast
from hpcjax.core.errors import DataFormatError
from hpcjax.data import catalog
from hpcjax.data.ens10 import MembersConfig

if TYPE_CHECKING:
    from hpcjax.data.postprocessing import Forecasts

MEMBERS = 11
COLUMNS = ("date", "rain", *(f"member_{number}" for number in range(1, MEMBERS + 1)))
FIRST_TEST_YEAR = 2010
# All that a pickled table of numbers and texts is made of.
_CLASSES = {
    *(("pandas.core.frame", "DataFrame"), ("builtins", "slice")),
    ("pandas.core.internals.managers", "BlockManager"),
    ("pandas._libs.internals", "_unpickle_block"),
    *(("numpy", "ndarray"), ("numpy", "dtype")),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.numeric", "_frombuffer"),
    *(("pandas.core.indexes.base", name) for name in ("Index", "_new_Index")),
    ("pandas.core.indexes.range", "RangeIndex"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RainIbkConfig(MembersConfig):
    """Three days' rain at Innsbruck from 2000 to 2013, and 11-member reforecasts.

    Values are √mm, whose errors are nearer to a Gaussian's. Days from 2010 on are for
    test, the two years before for validation, and what is earlier for training.

    Attributes:
      train_all: whether the years of validation are for training too.
    """

    members: Annotated[int, AtLeast(2)] = MEMBERS
    train_all: bool = False

    def open(self, root: pathlib.Path) -> "Forecasts":
        """Reads the table."""
        import xarray as xr

        from hpcjax.data import postprocessing

        days, rain, members = read(catalog.locate("rain-ibk", root)["rain.csv"])
        # One point, in degrees.
        coords = {"time": days, "latitude": [47.27], "longitude": [11.39]}
        dims = ("time", "latitude", "longitude")
        truth = xr.DataArray(np.sqrt(rain)[:, None, None], coords, dims, name="rain")
        values = np.sqrt(members).T[:, :, None, None]
        numbers = {"number": np.arange(1, MEMBERS + 1), **coords}
        forecast = xr.DataArray(values, numbers, ("number", *dims))
        test = tuple(range(FIRST_TEST_YEAR, FIRST_TEST_YEAR + 4))
        chosen = () if self.train_all else (FIRST_TEST_YEAR - 2, FIRST_TEST_YEAR - 1)
        parts = postprocessing.split_by_year(days, chosen, test)
        return postprocessing.Forecasts(forecast.to_dataset(name="rain"), truth, parts)


def read(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns days [n], rain [n] and members [n, 11], in mm.

    Raises:
      DataFormatError: a file of another form, or numbers below zero.
    """
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    try:
        if tuple(rows[0]) != COLUMNS:
            raise ValueError(f"columns {rows[0]}")
        days = np.array([row[0] for row in rows[1:]], "datetime64[ns]")
        values = np.array([row[1:] for row in rows[1:]], np.float64)
        if values.shape[1:] != (1 + MEMBERS,) or not (values >= 0).all():
            raise ValueError("a number below zero, or none")
    except (ValueError, IndexError) as error:
        raise DataFormatError(
            f"{path}: expected the columns {', '.join(COLUMNS)}, found {error}"
        ) from error
    return days, values[:, 0], values[:, 1:]


class _Tables(pickle.Unpickler):
    """Makes nothing but the classes of a table, so that no other code can be run."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns a class or function of the list."""
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name}, which no table has")
        # NumPy 2 has these under another name.
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def build(name: str, folder: pathlib.Path, report: Callable[[str], None]) -> None:
    """Turns the package's table into "rain.csv".

    Args:
      name: of the data set.
      folder: has "RainIbk.pickle.xz".
      report: is called with a line.

    Raises:
      DataFormatError: it holds other classes than those of a table, or another table.
    """
    source = folder / "RainIbk.pickle.xz"
    try:
        content = lzma.decompress(source.read_bytes())
        frame = _Tables(io.BytesIO(content)).load()
        members = [f"rainfc.{number}" for number in range(1, MEMBERS + 1)]
        table = frame[["rain", *members]].astype(float)
        days = [str(day) for day in frame["rownames"]]
    except (lzma.LZMAError, pickle.UnpicklingError, KeyError, ValueError) as error:
        raise DataFormatError(f"{source}: expected RainIbk, found {error}") from error
    lines = io.StringIO(newline="")
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(COLUMNS)
    rows = zip(days, table.to_numpy().tolist(), strict=True)
    writer.writerows([day, *row] for day, row in rows)
    files.write_atomic(folder / "rain.csv", lines.getvalue())
    source.unlink()
    report(f"{name}: {len(days)} days from {days[0]} to {days[-1]}")
