"""Currents of electrons and phonons through a device, and what is conserved of them."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np

from hpcjax import runs, solvers
from hpcjax.core import checks, config

log = logging.getLogger(__name__)

Algorithm = Literal["sequential", "batched", "fissioned", "tiled"]
BROKEN = {
    "swapped": {"swapped": 1.0},
    "transposed": {"transposed": 0.0},
    "spin": {"spin": 1.0},
    "between": {"between": -1.0},
}
CONTACTS = ("left", "right")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A device between two leads, and its grid.

    Attributes:
      device: what is between the leads.
      bias: of the left lead over the right.
      temperature: k T of both.
      low: the lowest energy.
      step: of energies, and the lowest frequency.
      energies: of electrons.
      frequencies: of phonons, multiples of the step.
      mixing: share of new self-energies in an iteration.
      tolerance: of their largest relative change.
      limit: of iterations.
      scattering: whether particles scatter.
      feedback: whether electrons heat phonons.
      algorithm: order of the sums of the electrons' self-energy.
      broken: none; "swapped", lesser for greater phonons in what is absorbed;
        "transposed", D^ij for D^ji there; "spin", phonons see electrons of one spin;
        "between", Π of two atoms has the wrong sign.
      seed: of nothing; the device has its own.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "energies": "60",
        "step": "0.04",
        "frequencies": "2",
        "limit": "3",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "current energy heat": "contact: into the device; heat is that of phonons",
        "coherent": "cut: current of electrons between slabs, to the right",
        "assisted": "cut: the current that phonons help",
        "phonons": "cut: coherent heat, to the right",
        "residual": "iteration: behind the last one its",
        "imbalance": ": of the currents, over the left one",
        "lost": ": share of the electrons' energy that phonons do not take away",
        "flatness": ": how far the whole current differs along the device",
        "iterations converged": ": how many, and whether they did",
    }

    device: solvers.JunctionConfig | solvers.ChainConfig | solvers.RibbonConfig = (
        solvers.JunctionConfig()
    )
    bias: float = 0.3
    temperature: config.Positive = 0.025
    low: float = -1.1
    step: config.Positive = 0.02
    energies: config.Several = 110
    frequencies: config.Size = 5
    mixing: config.Fraction = 0.6
    tolerance: config.Positive = 1e-10
    limit: config.Size = 200
    scattering: bool = True
    feedback: bool = True
    algorithm: Algorithm = "tiled"
    broken: Literal["no", "swapped", "transposed", "spin", "between"] = "no"
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require(
            self.frequencies < self.energies,
            "frequencies must be fewer than energies",
            frequencies=self.frequencies,
            energies=self.energies,
        )
        momenta = getattr(self.device, "momenta", (1, 1))
        rule = "device.momenta of phonons must be a sub-grid of those of electrons"
        checks.require(momenta[0] % momenta[1] == 0, rule, momenta=momenta)

    def labels(self) -> "runs.Labels":
        """Returns the contacts, the cuts between slabs, and the iterations."""
        cuts = range(1, _slabs(self))
        return {"contact": CONTACTS, "cut": cuts, "iteration": range(self.limit)}


def _slabs(cfg: Config) -> int:
    device = cfg.device
    return device.atoms if isinstance(device, solvers.JunctionConfig) else device.slabs


@runs.measured
def run(cfg: Config) -> "runs.Figures":
    """Solves for Green's functions, self-energies and currents."""
    import jax

    with jax.enable_x64(True):  # here alone: all else keeps float32
        found = jax.device_get(_solve(cfg))
        figures = {
            "imbalance": float(found.imbalance()),
            "lost": float(abs(1 + found.energy_ratio())),
            "flatness": float(found.flatness()),
            "iterations": int(found.iterations),
            "converged": float(found.converged),
        }
    if not found.converged:
        log.warning("the Born loop has not converged: residual %g", _last(found))
    assisted = -found.assisted.cumsum()[:-1]
    return {
        **{name: getattr(found, name) for name in ("current", "energy", "heat")},
        "coherent": found.cuts,
        "assisted": assisted,
        "phonons": found.heat_cuts,
        "residual": _fill(found.residuals, found.iterations),
        **figures,
    }


def _solve(cfg: Config) -> "solvers.Result":
    return solvers.scba(
        cfg.device.make(),
        cfg.bias,
        cfg.temperature,
        solvers.make_grid(cfg.low, cfg.step, cfg.energies, cfg.frequencies),
        mixing=cfg.mixing,
        tolerance=cfg.tolerance,
        limit=cfg.limit,
        feedback=cfg.feedback,
        algorithm=cfg.algorithm,
        flags=solvers.Flags(
            scattering=float(cfg.scattering), **BROKEN.get(cfg.broken, {})
        ),
    )


def _fill(residuals: np.ndarray, iterations: int) -> np.ndarray:
    """Returns them with the last one repeated, where no iteration was needed."""
    number = np.arange(len(residuals))
    return residuals[np.minimum(number, iterations - 1)]


def _last(found: "solvers.Result") -> float:
    return float(found.residuals[int(found.iterations) - 1])
