"""Times of the electrons' self-energy, the same sum in several orders."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpcjax import cost, perf, runs, solvers
from hpcjax.core import checks, config

if TYPE_CHECKING:
    import jax

ORDERS = ("sequential", "batched", "fissioned", "tiled", "window")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Sizes of the sum, of complex numbers of 16 bytes.

    Attributes:
      momenta: of electrons.
      qs: of phonons.
      energies: of electrons.
      frequencies: of phonons.
      atoms: of a ring.
      bonds: of an atom to as many before as behind it.
      orbitals: of an atom.
      directions: in which atoms move.
      repetitions: timed rounds.
      seed: of the numbers.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "energies": "6",
        "frequencies": "2",
        "atoms": "4",
        "bonds": "2",
        "orbitals": "2",
        "directions": "1",
        "repetitions": "2",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "order repetition: of one sum",
        "gflop": "order: of an iteration by the formulas; this sum is a quarter",
        "distance": "order: from the sequential one, over the largest entry",
    }

    momenta: config.Size = 3
    qs: config.Size = 3
    energies: config.Size = 64
    frequencies: config.Size = 8
    atoms: config.Several = 32
    bonds: config.Several = 4
    orbitals: config.Size = 4
    directions: config.Size = 3
    repetitions: config.Several = 3
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.momenta % self.qs == 0 and self.bonds % 2 == 0
        checks.require(
            good and self.bonds < self.atoms,
            "momenta must be a multiple of qs, bonds even and fewer than atoms",
            momenta=self.momenta,
            qs=self.qs,
            bonds=self.bonds,
            atoms=self.atoms,
        )

    def labels(self) -> "runs.Labels":
        """Returns the orders of sums, and the repetitions."""
        return {"order": ORDERS, "repetition": range(self.repetitions)}


@runs.measured
def run(cfg: Config) -> "runs.Figures":
    """Times Σ M G(E − ω, k − q) D(ω, q) M† in turns."""
    import jax

    with jax.enable_x64(True):
        given = jax.device_put(_draw(cfg))
        programs = {name: jax.jit(order) for name, order in _orders().items()}
        found = {name: np.asarray(each(*given)) for name, each in programs.items()}
        thunks = {
            name: functools.partial(each, *given) for name, each in programs.items()
        }
        timed = perf.compare(
            thunks, "batched", repetitions=cfg.repetitions, warmup=0
        ).rename(candidate="order")
    exact = found["sequential"]
    distance = [np.abs(found[n] - exact).max() / np.abs(exact).max() for n in ORDERS]
    return {
        "seconds": timed["seconds"],
        "gflop": [_gflop(cfg, name) for name in ORDERS],
        "distance": distance,
    }


def _draw(cfg: Config) -> tuple[Any, ...]:
    """Returns G with zeros before its first energy, D, M and neighbours."""
    rng = np.random.default_rng(cfg.seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape) + 1j * rng.normal(size=shape)

    matrix, tensor = (cfg.orbitals,) * 2, (cfg.directions,) * 2
    greens = draw(cfg.momenta, cfg.energies, cfg.atoms, *matrix)
    before = np.zeros((cfg.momenta, cfg.frequencies, cfg.atoms, *matrix))
    far = [d for d in range(-(cfg.bonds // 2), cfg.bonds // 2 + 1) if d]
    return (
        np.concatenate([before, greens], 1),
        draw(cfg.qs, cfg.frequencies, cfg.atoms, cfg.bonds, *tensor),
        draw(cfg.atoms, cfg.bonds, cfg.directions, *matrix),
        (np.arange(cfg.atoms)[:, None] + far) % cfg.atoms,
    )


def _orders() -> dict[str, Callable[..., Any]]:
    own: Any = ORDERS[:-1]
    orders = {n: functools.partial(solvers.emit, algorithm=n) for n in own}
    return {**orders, "window": _by_window}


def _by_window(
    padded: "jax.Array",
    bonds: "jax.Array",
    gradients: "jax.Array",
    neighbours: "jax.Array",
) -> "jax.Array":
    """Sums as tiled does, of windows (k − q, E − ω) written out as a matrix."""
    import jax
    import jax.numpy as jnp

    momenta, (qs, frequencies) = len(padded), bonds.shape[:2]
    energies = padded.shape[1] - frequencies
    k = jnp.arange(momenta)[:, None] - jnp.arange(qs) * (momenta // qs)
    e = jnp.arange(energies)[:, None] + jnp.arange(frequencies)[::-1]

    def of_atom(own: "tuple[jax.Array, ...]") -> "jax.Array":
        bonds, gradients, neighbours = own
        left = solvers.left_factor(padded, gradients[None], neighbours[None])[:, :, 0]
        right = solvers.right_factor(bonds[:, :, None], gradients[None])[:, :, 0]
        window = left[k[:, None, :, None] % momenta, e[None, :, None, :]]
        return jnp.einsum("keqwbiop,qwbipr->keor", window, right)

    given = jnp.moveaxis(bonds, 2, 0), gradients, neighbours
    return jnp.moveaxis(jax.lax.map(of_atom, given), 0, 2)


def _gflop(cfg: Config, order: str) -> float:
    """Returns the formula's operations; only loops over all eight repeat M G."""
    sizes = cost.TransportSizes(
        momenta=cfg.momenta,
        qs=cfg.qs,
        energies=cfg.energies,
        frequencies=cfg.frequencies,
        atoms=cfg.atoms,
        bonds=cfg.bonds,
        orbitals=cfg.orbitals,
        directions=cfg.directions,
    )
    repeats = order in ("sequential", "batched")
    return cost.sse_flops(sizes, "original" if repeats else "tiles") / 1e9
