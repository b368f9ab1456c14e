"""Simulated universes, from whose cubes cosmological parameters are to be told.

A Gaussian random field with the spectrum of Bardeen, Bond, Kaiser and Szalay (1986,
Eq. G3) moves particles by Zel'dovich's approximation; they are counted by cloud in
cell.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int

from hpcjax.core import checks
from hpcjax.core.config import AtLeast, Config, Count, Positive, Share, Size
from hpcjax.core.objective import Objective
from hpcjax.data.objectives import REGRESSION
from hpcjax.data.source import Batch, Dataset, check_indices, split

MEANS = np.array([0.3, 0.8, 0.96, 0.7])
RANGES = np.array([0.2, 0.4, 0.3, 0.2])
# Parts of a cell to which displacements are rounded: weights are exact in float64 then,
# and so is the sum of counts.
_STEPS = 256


class Cosmology(NamedTuple):
    """Parameters of a universe.

    Attributes:
      matter: Ω_m, of a flat universe.
      sigma8: standard deviation of the linear density in spheres of 8 Mpc/h.
      tilt: n_s.
      hubble: h.
    """

    matter: float
    sigma8: float
    tilt: float
    hubble: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniversesConfig(Config):
    """Cubes of simulated universes, with the four parameters that they were drawn with.

    Ω_m 0.3 ± 0.2, σ_8 0.8 ± 0.4, n_s 0.96 ± 0.3 and h 0.7 ± 0.2 are uniform, and given
    as numbers from −1 to 1.

    Attributes:
      count: number of universes; universe n is the same for every number of them.
      width: cells of a universe along each axis, and as many particles.
      cell: width of one, in Mpc/h.
      redshifts: one channel for each.
      boxes: into how many examples a universe is cut along each axis.
      validation: share of the universes held out, at least one, with all their boxes.
      draw_seed: chooses universes and split; it is not the seed of the run.
    """

    objective: ClassVar[Objective] = REGRESSION
    smoke: ClassVar[Mapping[str, str]] = {"count": "4", "width": "8"}

    count: Annotated[int, AtLeast(2)] = 64
    width: Annotated[int, AtLeast(4)] = 16
    cell: Positive = 8.0
    redshifts: tuple[float, ...] = (0.0,)
    boxes: Size = 1
    validation: Share = 0.25
    draw_seed: Count = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "redshifts must be at least one number, none below 0"
        good = bool(self.redshifts) and all(0 <= z < np.inf for z in self.redshifts)
        checks.require(good, rule, redshifts=self.redshifts)
        rule = "boxes must divide the width"
        given = {"boxes": self.boxes, "width": self.width}
        checks.require(self.width % self.boxes == 0, rule, **given)

    def load(self, root: pathlib.Path | None = None) -> Dataset:
        """Returns ln(1 + counts) of boxes, split by universe; `root` is not used.

        Examples:
          >>> found = UniversesConfig(count=4, width=8, boxes=2).load()
          >>> len(found.train), len(found.validation), found.inputs, found.outputs
          (24, 8, (4, 4, 4, 1), 4)
        """
        del root
        parts = []
        for numbers in split(self.count, self.validation, self.draw_seed):
            each = [self._simulate(int(number)) for number in numbers]
            x, y = (np.concatenate(both) for both in zip(*each, strict=True))
            parts.append(VolumeSource(x, y))
        side = self.width // self.boxes
        inputs = (side, side, side, len(self.redshifts))
        return Dataset(parts[0], parts[1], inputs, len(MEANS), REGRESSION)

    def _simulate(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the boxes of a universe, and its parameters once for each."""
        rng = np.random.Generator(
            np.random.Philox(self.draw_seed, counter=number << 64)
        )
        drawn = rng.uniform(-1, 1, len(MEANS))
        own = Cosmology(*(MEANS + RANGES * drawn).tolist())
        field = linear_field(own, self.width, self.cell, rng)
        shifts = displacements(field, self.cell) / self.cell
        counts = [count_cells(shifts * growth(own.matter, z)) for z in self.redshifts]
        x = cut_boxes(np.log1p(np.stack(counts, axis=-1)), self.boxes)
        return x.astype(np.float32), np.tile(drawn.astype(np.float32), (len(x), 1))


def cut_boxes(
    cube: Float[np.ndarray, "width width width channels"], boxes: int
) -> Float[np.ndarray, "boxes3 side side side channels"]:
    """Returns the boxes of a cube that is cut into so many along each axis."""
    side = len(cube) // boxes
    cut = cube.reshape(*[boxes, side] * 3, -1).transpose(0, 2, 4, 1, 3, 5, 6)
    return cut.reshape(-1, side, side, side, cube.shape[-1])


class VolumeSource:
    """Volumes and the numbers that are to be told of them."""

    def __init__(
        self,
        volumes: Float32[np.ndarray, "n depth height width channels"],
        numbers: Float32[np.ndarray, "n numbers"],
    ) -> None:
        self.volumes, self.numbers = volumes, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def gather(self, indices: Int[np.ndarray, " batch"]) -> Batch:
        """Returns "x", the volumes, and "y", [batch, numbers]."""
        check_indices(indices, len(self))
        return {"x": self.volumes[indices], "y": self.numbers[indices]}


def spectrum(own: Cosmology, k: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
    """Returns the linear power spectrum today, (Mpc/h)³; 0 at k = 0.

    P(k) = A k^n_s T(q)², q = k / (Ω_m h), with A such that the variance in spheres of 8
    Mpc/h is σ_8².

    Args:
      own: the parameters.
      k: wave numbers, h/Mpc.
    """
    fine = np.geomspace(1e-4, 1e2, 4096)
    x = 8 * fine
    ball = 3 * (np.sin(x) - x * np.cos(x)) / x**3
    # dk = k d(ln k)
    power = fine**3 * _shape(own, fine) * ball**2 / (2 * np.pi**2)
    return _shape(own, k) * own.sigma8**2 / np.trapezoid(power, np.log(fine))


def _shape(own: Cosmology, k: np.ndarray) -> np.ndarray:
    """Returns k^n_s T(q)², BBKS Eq. G3."""
    safe = np.where(k > 0, k, 1.0)
    q = safe / (own.matter * own.hubble)
    series = 1 + 3.89 * q + (16.1 * q) ** 2 + (5.46 * q) ** 3 + (6.71 * q) ** 4
    transfer = np.log1p(2.34 * q) / (2.34 * q) * series**-0.25
    return np.where(k > 0, safe**own.tilt * transfer**2, 0.0)


def _waves(width: int, cell: float) -> list[np.ndarray]:
    """Returns wave numbers along each axis, of `rfftn`."""
    full, half = (2 * np.pi * f(width, cell) for f in (np.fft.fftfreq, np.fft.rfftfreq))
    return list(np.meshgrid(full, full, half, indexing="ij"))


def linear_field(
    own: Cosmology, width: int, cell: float, rng: np.random.Generator
) -> Float[np.ndarray, "width width width"]:
    """Returns a periodic Gaussian random field of the density contrast today.

    Args:
      own: the parameters.
      width: cells along each axis.
      cell: width of one, Mpc/h.
      rng: draws white noise, whose spectrum is cell³.
    """
    k = np.sqrt(sum(wave**2 for wave in _waves(width, cell)))
    noise = np.fft.rfftn(rng.normal(size=(width,) * 3))
    return _invert(noise * np.sqrt(spectrum(own, k) / cell**3), width)


def _invert(modes: np.ndarray, width: int) -> np.ndarray:
    """Returns the field of its modes."""
    return np.fft.irfftn(modes, (width,) * 3, axes=(0, 1, 2))


def displacements(
    field: Float[np.ndarray, "width width width"], cell: float
) -> Float[np.ndarray, "3 width width width"]:
    """Returns Zel'dovich's ψ, Mpc/h: ψ(k) = i k δ(k) / k², so that δ = −div ψ.

    Waves of two cells have no slope along their axis, by which that is 0.
    """
    width = len(field)
    waves, modes = _waves(width, cell), np.fft.rfftn(field)
    square = sum(wave**2 for wave in waves)
    scaled = 1j * modes / np.where(square > 0, square, 1.0)
    # Else they would shift particles along two axes and not along the halved third.
    slopes = [np.where(np.isclose(abs(k), np.pi / cell), 0.0, k) for k in waves]
    return np.stack([_invert(slope * scaled, width) for slope in slopes])


def growth(matter: float, redshift: float) -> float:
    """Returns D(z) / D(0) of a flat universe, by Carroll, Press and Turner (1992)."""

    def scaled(z: float) -> float:
        density = matter * (1 + z) ** 3
        now = density / (density + 1 - matter)
        rest = 1 - now
        below = now ** (4 / 7) - rest + (1 + now / 2) * (1 + rest / 70)
        return 2.5 * now / below / (1 + z)

    return scaled(redshift) / scaled(0.0)


def count_cells(
    shifts: Float[np.ndarray, "3 width width width"],
) -> Float[np.ndarray, "width width width"]:
    """Returns how many particles are in each cell, by cloud in cell.

    Each particle is one cell wide, and its parts are counted where they are. Their sum
    is the number of particles, exactly.

    Args:
      shifts: from the middle of each cell to its particle, in cells; space is periodic.
    """
    width = shifts.shape[1]
    places = np.stack(np.meshgrid(*[np.arange(width)] * 3, indexing="ij"))
    steps = np.round(shifts * _STEPS).astype(np.int64) + places * _STEPS
    cells, parts = np.divmod(steps.reshape(3, -1), _STEPS)
    counts = np.zeros((width,) * 3)
    for corner in np.ndindex(2, 2, 2):
        sides = [
            part if up else _STEPS - part
            for part, up in zip(parts, corner, strict=True)
        ]
        at = [(cell + up) % width for cell, up in zip(cells, corner, strict=True)]
        np.add.at(counts, tuple(at), np.prod(sides, axis=0) / _STEPS**3)
    return counts
