"""A field that is a network: its bytes, and its values anywhere."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Float

from hpcjax.compress.fields import _container
from hpcjax.compress.fields._grid import DIMS, Grid, read_grid
from hpcjax.compress.fields._report import Report, score
from hpcjax.core import checks, trees
from hpcjax.core.config import Config
from hpcjax.core.errors import ConfigError, DataFormatError, Diverged
from hpcjax.metrics.grids import require_same_grid

_CHUNK = 1 << 13  # points that are decoded at once
_STATE = "statistics/"


class Scaling(NamedTuple):
    """How values z of a level come from a network's y: z = shift + scale y.

    Attributes:
      shift: of each level, float32.
      scale: likewise.
    """

    shift: np.ndarray
    scale: np.ndarray


def range_scaling(values: Float[np.ndarray, "t p y x"]) -> Scaling:
    """Returns z = mid + 0.7 y (max − min), by level."""
    low, high = values.min((0, 2, 3)), values.max((0, 2, 3))
    scale = np.where(high > low, 0.7 * (high - low), 1)
    return Scaling((low + high) / 2, scale.astype(np.float32))


def pressure_scaling(level: Float[np.ndarray, " p"]) -> Scaling:
    """Returns z = mean + y std / 0.9 of the geopotential, in m²/s², by pressure in hPa.

    Its mean is 431,500 − 61,500 ln p, its deviation 38,500 − 3,500 ln p.

    Raises:
      ConfigError: a pressure that is not positive.
    """
    checks.require(bool((level > 0).all()), "levels must be positive", level=level)
    mean, std = 431_500 - 61_500 * np.log(level), 38_500 - 3_500 * np.log(level)
    return Scaling(mean.astype(np.float32), (std / 0.9).astype(np.float32))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CompressedField:
    """A field as a network of its coordinates.

    Attributes:
      grid: on which it was given.
      network: the config of the network, such as `models.CoordNetConfig`.
      params: its parameters, rounded to the dtypes in which they are stored.
      statistics: those of its batch norms, likewise.
      scaling: of its outputs.
      name: of the variable.
      attrs: of the variable, as far as JSON can say them.
    """

    grid: Grid
    network: Config
    params: Any
    statistics: Any
    scaling: Scaling
    name: str = ""
    attrs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def _content(self) -> bytes:
        times = np.asarray(self.grid.time)
        dated = times.dtype.kind in "mM"
        header = {
            "kind": "network",
            "network": dataclasses.asdict(self.network),
            "dims": self.grid.dims,
            "time": times.dtype.str,
            "name": self.name,
            "attrs": dict(self.attrs),
        }
        # Times are mostly as far apart as the two before.
        counts = np.diff(times.view(np.int64), prepend=0) if dated else times
        arrays = {
            "time": np.asarray(counts, np.int64 if dated else np.float64),
            **{dim: np.asarray(getattr(self.grid, dim)) for dim in DIMS[1:]},
            **self.scaling._asdict(),
            **trees.flatten(self.params),
            **{_STATE + p: x for p, x in trees.flatten(self.statistics).items()},
        }
        return _container.pack(header, {n: np.asarray(x) for n, x in arrays.items()})

    def to_bytes(self) -> bytes:
        """Returns everything that decoding needs, but for the code."""
        return self._content

    @classmethod
    def from_bytes(cls, content: bytes, network: type[Config]) -> "CompressedField":
        """Returns the field of `to_bytes`.

        Args:
          content: the bytes.
          network: the class of the network's config, `models.CoordNetConfig`.

        Raises:
          DataFormatError: they are damaged, or of another kind of network.
        """
        header, arrays = _container.unpack(content)
        if header.get("kind") != "network":
            raise DataFormatError(f"expected a network, found {header.get('kind')!r}")
        try:
            return cls._read(header, arrays, network(**header["network"]))
        except (KeyError, TypeError, ConfigError) as error:
            raise DataFormatError(f"no {network.__name__}: {error}") from error

    @classmethod
    def _read(
        cls, header: Mapping[str, Any], arrays: dict[str, np.ndarray], network: Config
    ) -> "CompressedField":
        time, level, latitude, longitude = (arrays.pop(dim) for dim in DIMS)
        dtype = np.dtype(header["time"])
        if dtype.kind in "mM":
            time = np.cumsum(time).view(dtype)
        scaling = Scaling(arrays.pop("shift"), arrays.pop("scale"))
        params, statistics = jax.eval_shape(network.make().init, jax.random.key(0))
        own = {p: arrays[_STATE + p] for p in trees.flatten(statistics)}
        return cls(
            grid=Grid(time, level, latitude, longitude, tuple(header["dims"])),
            network=network,
            params=trees.unflatten(params, {p: arrays[p] for p in trees.paths(params)}),
            statistics=trees.unflatten(statistics, own),
            scaling=scaling,
            name=header["name"],
            attrs=header["attrs"],
        )

    @property
    def nbytes(self) -> int:
        """How many bytes it has in all."""
        return len(self._content)

    @property
    def ratio(self) -> float:
        """Bytes of the field in float32, over those that it has."""
        return 4 * float(np.prod(self.grid.shape)) / self.nbytes

    @functools.cached_property
    def _evaluate(self) -> Any:
        model = self.network.make()
        wide = jax.tree.map(
            lambda x: jnp.asarray(x, jnp.float32), (self.params, self.statistics)
        )

        @jax.jit
        def evaluate(weights: Any, points: jax.Array) -> jax.Array:
            return model.apply(*weights, points, train=False)[0]

        return functools.partial(evaluate, wide)

    def _values(self, points: np.ndarray, shift: Any, scale: Any) -> np.ndarray:
        """Returns the values of points [n, 4], always in programs of one size."""
        found = []
        for start in range(0, len(points), _CHUNK):
            part = points[start : start + _CHUNK]
            full = np.pad(part, ((0, _CHUNK - len(part)), (0, 0)), mode="edge")
            found.append(np.asarray(self._evaluate(full))[: len(part)])
        return (shift + scale * np.concatenate(found)).astype(np.float32)

    def decode(self, sel: Mapping[str, Any] | None = None) -> xr.DataArray:
        """Returns the field, or what xarray's `sel` takes of it; only this is computed.

        Args:
          sel: labels by dimension, such as `{"time": "1997"}`.
        """
        grid = self.grid
        every = {
            dim: xr.DataArray(np.arange(len(axis)), {dim: axis}, (dim,))
            for dim, axis in grid.coords.items()
        }
        chosen = {
            dim: index.sel({dim: (sel or {})[dim]}) if dim in (sel or {}) else index
            for dim, index in every.items()
        }
        axes = [np.atleast_1d(chosen[dim]) if dim in chosen else [0] for dim in DIMS]
        t, p, y, x = (each.ravel() for each in np.meshgrid(*axes, indexing="ij"))
        columns = (t, grid.level[p], grid.latitude[y], grid.longitude[x])
        points = np.stack(columns, axis=1).astype(np.float32)
        values = self._values(points, self.scaling.shift[p], self.scaling.scale[p])
        coords = {dim: index[dim] for dim, index in chosen.items()}
        dims = [dim for dim in chosen if chosen[dim].ndim]
        shape = [chosen[dim].size for dim in dims]
        return xr.DataArray(
            values.reshape(shape), coords, dims, self.name or None, dict(self.attrs)
        )

    def sample(
        self, time: Any, level: Any, latitude: Any, longitude: Any
    ) -> np.ndarray:
        """Returns values at any points, float32.

        Args:
          time: as the field has it, or between; ignored without one, as is
          level: in hPa.
          latitude: in degrees; up to a cell beyond the first and last.
          longitude: in degrees.

        Raises:
          DataFormatError: a point outside of the field's axes.
        """
        grid = self.grid
        for dim, given in zip(DIMS, (time, level, latitude), strict=False):
            if dim in grid.dims:
                _check_inside(dim, given, getattr(grid, dim))
        times = _like(time, grid.time).astype(np.float64)
        steps = np.interp(
            times, grid.time.astype(np.float64), np.arange(len(grid.time))
        )
        order = np.argsort(grid.level)
        ascending = grid.level[order]
        shift, scale = (
            np.interp(np.asarray(level, float), ascending, each[order])
            for each in self.scaling
        )
        given = np.broadcast_arrays(steps, level, latitude, longitude, shift, scale)
        points = np.stack([each.ravel() for each in given[:4]], axis=1)
        values = self._values(
            points.astype(np.float32), given[4].ravel(), given[5].ravel()
        )
        return values.reshape(given[0].shape)

    def report(self, truth: xr.DataArray) -> Report:
        """Returns how far the decoded field is from the truth, of the same grid.

        Raises:
          DataFormatError: it is not a field of a globe, or of other times, places or
            units.
        """
        other, values = read_grid(truth)
        own, its = (xr.Dataset(coords=grid.coords) for grid in (self.grid, other))
        require_same_grid(own, its, ("compressed values", "truth"), DIMS)
        units = [each.get("units") for each in (self.attrs, truth.attrs)]
        if units[0] != units[1]:
            raise DataFormatError(
                f"compressed values are in {units[0]}, truth in {units[1]}"
            )
        decoded = self.decode().to_numpy().reshape(self.grid.shape)
        return score(decoded, values, self.grid.latitude)


def _like(given: Any, axis: np.ndarray) -> np.ndarray:
    """Returns dates as an axis has them, or numbers."""
    return np.asarray(given, axis.dtype if axis.dtype.kind in "mM" else np.float64)


def _check_inside(dim: str, given: Any, axis: np.ndarray) -> None:
    """Raises DataFormatError unless all that is given lies on an axis."""
    given = _like(given, axis)
    low, high = axis.min(), axis.max()
    if dim == "latitude":
        # The rows next to the poles are of cells that reach them.
        cell = np.abs(np.diff(axis)).max()
        low, high = max(low - cell, -90.0), min(high + cell, 90.0)
    outside = given[~((given >= low) & (given <= high))]
    if outside.size:
        raise DataFormatError(f"{dim} must be from {low} to {high}: got {outside[0]}")


def store(params: Any, statistics: Any, precision: str) -> tuple[Any, Any]:
    """Returns parameters and statistics in the dtypes in which they are stored.

    Those of residual blocks are float16; the first and last layers too with "half",
    otherwise float32. Statistics are of blocks alone.

    Raises:
      Diverged: some are not finite, or too large for float16.
    """

    def round_leaf(path: str, x: jax.Array) -> np.ndarray:
        half = precision == "half" or path.startswith("block")
        with np.errstate(over="ignore"):  # is told below
            return np.asarray(x, np.float16 if half else np.float32)

    leaves = {path: round_leaf(path, x) for path, x in trees.flatten(params).items()}
    halves = jax.tree.map(lambda x: np.asarray(x, np.float16), statistics)
    for path, x in {**leaves, **trees.flatten(halves)}.items():
        if not np.isfinite(x).all():
            raise Diverged(
                f"{path} has numbers that {x.dtype} cannot hold: take a smaller "
                "learning_rate or clip"
            )
    return trees.unflatten(params, leaves), halves
