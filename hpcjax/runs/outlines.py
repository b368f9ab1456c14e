"""What an experiment's result consists of, said beside its config.

Tables are reduced from results. That they can be, whatever the figures are, is tested
on drawn ones of this form; that the form is right, on a small run.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import xarray as xr

from hpcjax.core.errors import ConfigError

Labels = Sequence[Any] | range | int


class Outline(NamedTuple):
    """The form of a result; made by `outline`.

    Attributes:
      columns: `{figure: dimensions}`, separated by spaces, none for a scalar. Or
        `{figure: (dimensions, values)}`, where a table wants more of the values than
        that they are positive.
      labels: those of each dimension; a number stands for as many without labels, which
        may be other ones in a result.
    """

    columns: Mapping[str, Any]
    labels: Mapping[str, Labels]

    def differences(self, dataset: xr.Dataset) -> list[str]:
        """Returns in words where a result differs; it may hold further figures."""
        found = []
        for name, given in self.columns.items():
            dims = tuple((given if isinstance(given, str) else given[0]).split())
            if name not in dataset:
                found.append(f"{name} is missing")
            elif dataset[name].dims != dims:
                found.append(f"{name} has {dataset[name].dims}, not {dims}")
        for dim, labels in self.labels.items():
            if isinstance(labels, int) or dim not in dataset.dims:
                continue
            result = dataset[dim].values.tolist()
            if result != list(labels):
                found.append(f"{dim} is {result}, not {list(labels)}")
        return found


def outline(columns: Mapping[str, Any], **labels: Labels) -> Outline:
    """Returns the form of a result; see `Outline`.

    An experiment says it in `outline(cfg)` beside `run(cfg, ctx)`.

    Raises:
      ConfigError: a dimension without labels, or labels of no dimension.

    Examples:
      >>> outline({"seconds": "mode repetition"}, mode=("a", "b"), repetition=3).labels
      {'mode': ('a', 'b'), 'repetition': 3}
    """
    dims = set(_dimensions(columns.values()))
    if dims != set(labels):
        raise ConfigError(
            f"labels must be given of {sorted(dims)}: got those of {sorted(labels)}"
        )
    return Outline(columns, labels)


def _dimensions(columns: Iterable[Any]) -> Iterable[str]:
    for given in columns:
        yield from (given if isinstance(given, str) else given[0]).split()
