"""The coordinate network: a field's value at any time, level and place."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hpcjax import layers
from hpcjax.core.config import check_fields
from hpcjax.core.dtypes import Policy
from hpcjax.core.keys import Key
from hpcjax.core.model import Model
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models.coord_net_config import CoordNetConfig
from hpcjax.models.modules import FLOAT32, BatchNorm, Dense


def draw_frequencies(
    rows: int, columns: int, sigma: float, seed: list[int]
) -> np.ndarray:
    """Returns a matrix of N(0, sigma²), float32, the same on every machine.

    Box and Muller's transform of Philox's bits: NumPy may change how it draws normal
    numbers, but not these bits, and files outlive versions.
    """
    bits = np.random.Philox(key=np.array(seed, np.uint64)).random_raw(
        2 * rows * columns
    )
    first, second = ((bits >> np.uint64(11)) * 2.0**-53).reshape(2, rows, columns)
    normal = np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * second)
    return (sigma * normal).astype(np.float32)


def to_unit_vector(latitude: jax.Array, longitude: jax.Array) -> jax.Array:
    """Returns (sin φ, cos φ sin λ, cos φ cos λ) [..., 3] of degrees.

    It is periodic in λ, and has one value at a pole.
    """
    phi, turn = jnp.deg2rad(latitude), jnp.deg2rad(longitude % 360)
    # cos φ of float32 is not zero at ±90°.
    ring = jnp.where(jnp.abs(latitude) >= 90, 0, jnp.cos(phi))
    parts = (jnp.sin(phi), ring * jnp.sin(turn), ring * jnp.cos(turn))
    return jnp.stack(parts, axis=-1)


class _Block(nnx.Module):
    """x + L₂ GELU(BN₂(L₁ GELU(BN₁(x)))); L₁ has no bias."""

    def __init__(self, width: int, policy: Policy, sync_axis: str | None):
        self.norm1, self.norm2 = (
            BatchNorm(width, policy=policy, sync_axis=sync_axis) for _ in range(2)
        )
        self.dense1 = Dense(width, width, policy=policy, use_bias=False)
        self.dense2 = Dense(width, width, policy=policy)

    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        y = layers.activation("gelu_erf", self.norm1(x, train=train))
        y = self.norm2(self.dense1(y), train=train)
        return x + self.dense2(layers.activation("gelu_erf", y))


class _CoordNet(nnx.Module):
    """The network of `coord_net`."""

    def __init__(self, cfg: CoordNetConfig, sync_axis: str | None, policy: Policy):
        self.cfg = cfg
        counts = cfg.time_features + cfg.level_features + cfg.place_features
        self.stem = Dense(2 * counts, cfg.width, policy=policy)
        for index in range(cfg.depth):
            setattr(self, f"block_{index}", _Block(cfg.width, policy, sync_axis))
        self.head = Dense(cfg.width, 1, policy=policy)

    def features(self, x: jax.Array) -> jax.Array:
        """Returns [sin 2πBx, cos 2πBx] of points [n, 4]."""
        cfg = self.cfg
        time, level, latitude, longitude = (x[:, i] for i in range(4))
        parts = (
            (cfg.time_features, time[:, None] / cfg.time_scale),
            (cfg.level_features, level[:, None] / 100),
            (cfg.place_features, to_unit_vector(latitude, longitude)),
        )
        phases = []
        for which, (count, part) in enumerate(parts):
            seed = [cfg.feature_seed, which]
            matrix = draw_frequencies(count, part.shape[1], cfg.sigma, seed)
            # A device may multiply float32 matrices in less; phases have to be exact.
            phases.append(jnp.dot(part, matrix.T, precision="highest"))
        phase = 2 * jnp.pi * jnp.concatenate(phases, axis=-1)
        return jnp.concatenate([jnp.sin(phase), jnp.cos(phase)], axis=-1)

    def __call__(self, x: jax.Array, *, train: bool, key: Key | None) -> jax.Array:
        del key
        y = self.stem(self.features(x))
        y = layers.activation("gelu_erf", y)
        for index in range(self.cfg.depth):
            y = getattr(self, f"block_{index}")(y, train=train)
        return jnp.tanh(self.head(layers.activation("gelu_erf", y)))[:, 0]


def coord_net(
    *,
    width: int = 512,
    depth: int = 12,
    time_features: int = 16,
    level_features: int = 128,
    place_features: int = 128,
    sigma: float = 1.6,
    time_scale: float = 60.0,
    feature_seed: int = 0,
    sync_axis: str | None = None,
    policy: Policy = FLOAT32,
) -> Model:
    """Returns a network f(t, p, φ, λ) of values in (−1, 1).

    Its inputs are sin 2πBx and cos 2πBx of fixed B ~ N(0, sigma²), with a B each for
    x = t / `time_scale`, p / 100 hPa and the unit vector of φ and λ. A dense layer with
    a GELU (that of the error function) is followed by `depth` blocks x + L₂ GELU(BN₂(L₁
    GELU(BN₁(x)))), a GELU, a dense layer and a tanh.

    `apply` takes points [n, 4]: the time in steps, the level in hPa, latitude and
    longitude in degrees, float32; it returns [n]. Longitudes 0 and 360 are the same,
    and at a pole all are.

    Args:
      width: of the blocks.
      depth: number of blocks.
      time_features: rows of the B of the time; 0 for a field that has no time.
      level_features: rows of that of the level; 0 for one level.
      place_features: rows of that of the place.
      sigma: deviation of B.
      time_scale: steps of time that are a unit.
      feature_seed: of B.
      sync_axis: mesh axis over which batch norms take their statistics.
      policy: dtypes of parameters and products.

    Raises:
      ConfigError: a size below 1, or a scale that is not positive.

    References:
      Huang, Hoefler, Compressing multidimensional weather and climate data into neural
      networks, ICLR 2023, section 3.

    Examples:
      >>> from hpcjax import models
      >>> models.num_params(coord_net(width=32))
      43969
    """
    sizes = {"width": width, "depth": depth, "place_features": place_features}
    other = {"time_features": time_features, "level_features": level_features}
    scales = {"sigma": sigma, "time_scale": time_scale, "feature_seed": feature_seed}
    options = sizes | other | scales
    check_fields(CoordNetConfig, **options)
    cfg = CoordNetConfig.of(options, coord_net)
    return from_nnx(lambda: _CoordNet(cfg, sync_axis, policy))
