"""A field of the sea's surface temperature, compressed in four ways."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np

from hpcjax import data, metrics, runs
from hpcjax.compress.fields.config import FitConfig
from hpcjax.core import config
from hpcjax.models import CoordNetConfig

if TYPE_CHECKING:
    import xarray as xr

FIGURES = ("bytes", "ratio", "wrmse", "wmae", "largest", "seconds", "natural")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A field and what compresses it.

    Attributes:
      codec: a network; or SZ3 at `bounds` errors, with two ways to predict, with and
        without the sphere's two axes made one; a cosine transform with ever fewer
        coefficients; the leading EOFs.
      network: of points.
      fit: its training.
      bounds: errors of SZ3, and cosine transforms.
      field: the real one, or a small made one.
      seed: of the network, its points, and a made field.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "field": "waves",
        "bounds": "2",
        "network.width": "4",
        "network.depth": "1",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "bytes": "point: that decoding needs, all of them",
        "ratio": "point: of the field's float32 over these",
        "wrmse wmae largest": "point: of errors in K",
        "seconds": "point: to compress",
        "month": "point latitude longitude: that of the warmest tropics, decoded",
        "truth": "latitude longitude: that month",
        "natural": "point: whether the size is the codec's own choice",
    }

    codec: Literal["network", "sz3", "dct", "eof"] = "network"
    network: CoordNetConfig = CoordNetConfig(
        width=48,
        depth=2,
        time_features=16,
        level_features=0,
        place_features=32,
        time_scale=24.0,
    )
    fit: FitConfig = FitConfig(
        steps=6000, batch_size=2048, learning_rate=1e-2, precision="half"
    )
    bounds: config.Several = 60
    field: Literal["sst-anomaly", "waves"] = "sst-anomaly"
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"point": 4, "latitude": 3, "longitude": 4}

    def typical(self) -> Mapping[str, list[float]]:
        """Returns sizes of a peer that are as small as any network, and larger ones."""
        return {"ratio": [4.0, 3.0, 2.0, 1.0], "natural": [1.0] * 4}


class Coded(NamedTuple):
    """A compressed field.

    Attributes:
      size: in bytes.
      decode: returns values in the field's shape.
      seconds: that compressing took.
      natural: whether SZ3 had the field's own shape, and its own choice of prediction.
    """

    size: int
    decode: Callable[[], np.ndarray]
    seconds: float
    natural: bool = True


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Compresses the field, at several sizes but for a network."""
    from hpcjax.compress import fields

    if cfg.field == "waves":
        field = data.make_waves(24, 12, cfg.seed)
    else:
        field = data.read_sst_anomaly(ctx.data_root)
    values, found, months = field.to_numpy(), [], []
    tropics = np.abs(field["latitude"].to_numpy()) < 10
    at = np.argmax(values[:, tropics].mean((1, 2)))
    for coded in CODECS[cfg.codec](cfg, field, ctx):
        decoded = coded.decode()
        errors = fields.score(decoded, values, field["latitude"].to_numpy())
        ratio = 4 * values.size / coded.size
        found.append((coded.size, ratio, *errors, coded.seconds, coded.natural))
        months.append(decoded[at])
    columns = np.array(found, float).T
    globe = ("latitude", "longitude")
    return runs.measured(
        {n: ("point", c) for n, c in zip(FIGURES, columns, strict=True)}
        | {"month": (("point", *globe), months), "truth": (globe, values[at])},
        coords={name: field[name].values for name in globe},
    )


def by_network(
    cfg: Config, field: "xr.DataArray", ctx: "runs.Context"
) -> Iterator[Coded]:
    """Yields the field as a network."""
    import jax

    from hpcjax.compress import fields

    began = time.perf_counter()
    coded = fields.compress(
        field,
        cfg.network,
        cfg.fit,
        key=jax.random.key(cfg.seed),
        told=lambda step, loss: ctx.record(step, loss=loss),
    )
    content, seconds = coded.to_bytes(), time.perf_counter() - began
    read = fields.CompressedField.from_bytes(content, type(cfg.network))
    yield Coded(len(content), lambda: read.decode().to_numpy(), seconds)


def by_sz3(cfg: Config, field: "xr.DataArray", ctx: "runs.Context") -> Iterator[Coded]:
    """Yields the field of SZ3 for every bound, prediction and shape."""
    from hpcjax.compress import fields

    del ctx
    values = field.to_numpy()
    shapes = (values.shape, (len(values), values[0].size))
    bounds = np.geomspace(1e-3, 0.9, cfg.bounds)
    ways: tuple[fields.Algorithm, ...] = ("INTERP_LORENZO", "LORENZO_REG")
    for shape, way, bound in itertools.product(shapes, ways, bounds):
        began = time.perf_counter()
        content = fields.sz3_encode(values.reshape(shape), bound, way)
        seconds = time.perf_counter() - began

        decode = functools.partial(_decode_sz3, content, shape, values.shape)
        natural = (shape, way) == (shapes[0], ways[0])
        yield Coded(len(content), decode, seconds, natural)


def _decode_sz3(
    content: bytes, shape: tuple[int, ...], own: tuple[int, ...]
) -> np.ndarray:
    from hpcjax.compress import fields

    return fields.sz3_decode(content, shape).reshape(own)


def by_dct(cfg: Config, field: "xr.DataArray", ctx: "runs.Context") -> Iterator[Coded]:
    """Yields the field as fewer and fewer of its cosines."""
    from hpcjax.compress import fields

    del ctx
    values = field.to_numpy()
    for share in np.geomspace(50, 2000, cfg.bounds):
        began = time.perf_counter()
        content = fields.dct_encode(values, max(1, round(values.size / share)))
        seconds = time.perf_counter() - began
        yield Coded(
            len(content), functools.partial(fields.dct_decode, content), seconds
        )


def by_eof(cfg: Config, field: "xr.DataArray", ctx: "runs.Context") -> Iterator[Coded]:
    """Yields the field as its eight to one leading patterns."""
    from hpcjax.compress import fields

    del cfg, ctx
    values = field.to_numpy()
    latitude = field["latitude"].to_numpy()
    weights = metrics.latitude_weights(latitude, "cos")[:, None]
    for rank in range(8, 0, -1):
        began = time.perf_counter()
        content = fields.eof_encode(values, weights, rank)
        seconds = time.perf_counter() - began
        yield Coded(
            len(content), functools.partial(fields.eof_decode, content), seconds
        )


CODECS = {"network": by_network, "sz3": by_sz3, "dct": by_dct, "eof": by_eof}
