"""Rain at Innsbruck, with the members of reforecasts: real ones, of a single place."""

import csv
import dataclasses
import io
import lzma
import pathlib
import pickletools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

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


def build(name: str, folder: pathlib.Path, report: Callable[[str], None]) -> None:
    """Turns the package's table into "rain.csv".

    The package has it pickled. Loading such a file can run any code, so its numbers and
    texts are read from what it would tell the loader, and nothing is loaded.

    Args:
      name: of the data set.
      folder: has "RainIbk.pickle.xz".
      report: is called with a line.

    Raises:
      DataFormatError: it holds another table, or none.
    """
    source = folder / "RainIbk.pickle.xz"
    try:
        days, values = _find_table(lzma.decompress(source.read_bytes()))
    except (lzma.LZMAError, ValueError) as error:
        raise DataFormatError(f"{source}: expected RainIbk, found {error}") from error
    lines = io.StringIO(newline="")
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(COLUMNS)
    rows = zip(days, values.tolist(), strict=True)
    writer.writerows([day, *row] for day, row in rows)
    files.write_atomic(folder / "rain.csv", lines.getvalue())
    source.unlink()
    report(f"{name}: {len(days)} days from {days[0]} to {days[-1]}")


def _find_table(content: bytes) -> tuple[list[str], np.ndarray]:
    """Returns days, and rain and members [days, 12], of a pickled table."""
    given = [argument for _, argument, _ in pickletools.genops(content)]
    texts = [each for each in given if isinstance(each, str)]
    days = [text for text in texts if re.fullmatch(r"\d{4}-\d\d-\d\d", text)]
    wanted = ["rain", *(f"rainfc.{number}" for number in range(1, MEMBERS + 1))]
    columns = list(dict.fromkeys(text for text in texts if text in wanted))
    size = 8 * len(wanted) * len(days)
    blocks = [
        bytes(each)
        for each in given
        if isinstance(each, bytes | bytearray) and len(each) == size
    ]
    if columns != wanted or len(blocks) != 1 or not days:
        raise ValueError(f"columns {columns}, {len(days)} days, {len(blocks)} blocks")
    return days, np.frombuffer(blocks[0], "<f8").reshape(len(wanted), -1).T
