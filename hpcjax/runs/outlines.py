"""What an experiment's result consists of, said once, in its config.

A config's `figures` are `{"names": "dimensions: meaning"}`, such as
`{"sent": "axis kind: bytes of a device", "rows unique": ": of a batch"}`, and its
`labels()` those of the dimensions. Tables are reduced from results. That they can be,
whatever the figures are, is tested on drawn ones of this form; that the form is right,
on a small run.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcjax.core.errors import ConfigError

if TYPE_CHECKING:  # for what figures a config has is printed without it, and faster
    import xarray as xr

Labels = Mapping[str, Collection[Any] | int]
Figures = Mapping[str, Any]


class Outline(NamedTuple):
    """The form of a result.

    Attributes:
      columns: `{figure: dimensions}`, separated by spaces, none for a scalar. Or
        `{figure: (dimensions, values)}`, where a table wants more of the values than
        that they are positive.
      labels: those of each dimension; a number stands for as many without labels, which
        may be other ones in a result.
    """

    columns: Mapping[str, Any]
    labels: Labels

    def differences(self, dataset: "xr.Dataset") -> list[str]:
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


class Figure(NamedTuple):
    """A figure that is declared: its dimensions, separated by spaces, and its meaning.

    The meaning is "" where none is given.
    """

    dims: str
    meaning: str


def declared(figures: Mapping[str, str]) -> dict[str, Figure]:
    """Returns each figure of a declaration, in which names may share a line.

    Examples:
      >>> declared({"rows unique": ": of a batch", "loss": "step"})["unique"]
      Figure(dims='', meaning='of a batch')
    """
    return {
        name: Figure(dims.strip(), meaning.strip())
        for names, said in figures.items()
        for dims, _, meaning in [said.partition(":")]
        for name in names.split()
    }


def of_config(cfg: Any) -> Outline:
    """Returns the form that a config declares by its `figures` and `labels()`.

    Args:
      cfg: the config; without `labels` its figures are scalars. Where a table wants
        more of values that are drawn than that they are positive, `typical()` returns
        them, `{figure: values}`.

    Raises:
      ConfigError: it declares no figures, a dimension without labels, or labels of no
        dimension.
    """
    figures = getattr(cfg, "figures", None)
    if not figures:
        raise ConfigError(f"{type(cfg).__qualname__} must declare `figures`")
    columns: dict[str, Any] = {n: said.dims for n, said in declared(figures).items()}
    labels = cfg.labels() if hasattr(cfg, "labels") else {}
    dims = {dim for each in columns.values() for dim in each.split()}
    if dims != set(labels):
        raise ConfigError(
            f"labels must be given of {sorted(dims)}: got those of {sorted(labels)}"
        )
    if hasattr(cfg, "typical"):
        columns |= {name: (columns[name], it) for name, it in cfg.typical().items()}
    return Outline(columns, labels)


def explain(cfg: Any, dataset: "xr.Dataset") -> "xr.Dataset":
    """Returns a result whose figures say what they mean, as their `long_name`."""
    for name, figure in declared(getattr(cfg, "figures", {})).items():
        if figure.meaning and name in dataset:
            dataset[name].attrs.setdefault("long_name", figure.meaning)
    return dataset


def declaring(source: str, run: Callable[..., Figures]) -> "Callable[..., xr.Dataset]":
    """Makes `run(cfg, ctx)` of a function that returns the values of its figures.

    Args:
      source: of the figures, see `results.measured`.
      run: a function of the config, and of the context if it takes two arguments. It
        returns `{figure: values}`.

    Returns:
      A function whose dataset has the dimensions and labels that the config declares.
      It raises ConfigError for a figure that is not declared, for one that is missing,
      and for values of another shape.
    """
    arguments = len(inspect.signature(run).parameters)

    @functools.wraps(run)
    def made(cfg: Any, ctx: Any = None) -> "xr.Dataset":
        return _assemble(cfg, run(*(cfg, ctx)[:arguments]), source)

    return made


def _assemble(cfg: Any, values: Figures, source: str) -> "xr.Dataset":
    """Returns values as the dataset that a config declares."""
    import numpy as np
    import xarray as xr

    figures, labels = declared(cfg.figures), of_config(cfg).labels
    others, absent = set(values) - set(figures), set(figures) - set(values)
    if others or absent:
        raise ConfigError(
            f"{type(cfg).__qualname__} declares {sorted(figures)}: got others, "
            f"{sorted(others)}, and lack {sorted(absent)}"
        )
    sizes = {
        d: each if isinstance(each, int) else len(each) for d, each in labels.items()
    }
    found = {}
    for name, (dims, _) in figures.items():
        array, wanted = np.asarray(values[name]), dims.split()
        if array.shape != tuple(sizes[dim] for dim in wanted):
            raise ConfigError(
                f"{name} is of { ({dim: sizes[dim] for dim in wanted}) }: "
                f"got values of shape {array.shape}"
            )
        found[name] = wanted, array
    named = {
        dim: list(each) for dim, each in labels.items() if not isinstance(each, int)
    }
    return xr.Dataset(found, named, {"source": source})
