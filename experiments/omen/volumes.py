"""What scattering sends: by the papers' formulas, and in programs for eight devices."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpcjax import cost, perf, runs, sharding, solvers
from hpcjax.core import checks, compat, config

if TYPE_CHECKING:
    from jax.stages import Compiled

MOMENTA = (3, 5, 7, 9, 11)
PROCESSES = (224, 448, 896, 1792, 2688)
SCHEMES = ("original", "tiles")
ALONE = (448, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A device small enough to be compiled for; the formulas' is the papers'.

    Attributes:
      te: tiles of energies.
      ta: tiles of atoms; as many devices as both have are simulated.
      momenta: of electrons.
      qs: of phonons.
      energies: of electrons.
      frequencies: of phonons.
      atoms: of a ring.
      bonds: of an atom, to as many before as behind it.
      orbitals: of an atom.
      directions: in which atoms move.
      seed: of nothing.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "te": "2",
        "ta": "1",
        "frequencies": "2",
        "energies": "4",
        "atoms": "4",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "weak": "momenta scheme: TiB of all processes, TE = Nk and TA = 256",
        "flops": "momenta scheme: Pflop",
        "strong": "processes scheme: TiB, TE = Nk = 7",
        "best": "processes: TiB of the best tiles",
        "best_te": "processes: their TE",
        "alone": ": TiB of 448 tiles of energies and none of atoms",
        "sent needed formula": "scheme: bytes of all devices, by program and by count",
    }

    te: config.Size = 4
    ta: config.Size = 2
    momenta: config.Size = 4
    qs: config.Size = 2
    energies: config.Size = 64
    frequencies: config.Size = 8
    atoms: config.Several = 16
    bonds: config.Several = 2
    orbitals: config.Size = 4
    directions: config.Size = 2
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        halo = self.bonds if self.ta > 1 else 0
        checks.require(
            self.bonds % 2 == 0 and self.atoms // self.ta + halo <= self.atoms,
            "bonds must be even, and tiles with their neighbours at most all atoms",
            bonds=self.bonds,
            atoms=self.atoms,
            ta=self.ta,
        )

    def labels(self) -> "runs.Labels":
        """Returns what the formulas are evaluated for."""
        return {"momenta": MOMENTA, "processes": PROCESSES, "scheme": SCHEMES}


@runs.simulated
def run(cfg: Config) -> "runs.Figures":
    """Evaluates the formulas, and compiles both schemes."""
    seven = cost.TransportSizes(7, 7)
    best = [cost.best_tiles(seven, processes) for processes in PROCESSES]
    weak = [
        [_tib(cost.TransportSizes(m, m), scheme, m, 256) for scheme in SCHEMES]
        for m in MOMENTA
    ]
    strong = [[_tib(seven, s, 7, p // 7) for s in SCHEMES] for p in PROCESSES]
    flops = [
        [cost.sse_flops(cost.TransportSizes(m, m), s) / 1e15 for s in SCHEMES]
        for m in MOMENTA
    ]
    small = _sizes(cfg)
    return {
        "weak": weak,
        "flops": flops,
        "strong": strong,
        "best": [plan.bytes / 2**40 for plan in best],
        "best_te": [plan.te for plan in best],
        "alone": _tib(seven, "tiles", *ALONE),
        "sent": [count_sent(compile_scheme(cfg, s)) for s in SCHEMES],
        "needed": [count_needed(cfg, s) for s in SCHEMES],
        "formula": [cost.sse_volume(small, s, cfg.te, cfg.ta) for s in SCHEMES],
    }


def _tib(sizes: "cost.TransportSizes", scheme: Any, te: int, ta: int) -> float:
    return cost.sse_volume(sizes, scheme, te, ta) / 2**40


def _sizes(cfg: Config) -> "cost.TransportSizes":
    return cost.TransportSizes(
        **{name: getattr(cfg, name) for name in cost.TransportSizes._fields}
    )


def compile_scheme(cfg: Config, scheme: str) -> "Compiled":
    """Compiles the electrons' self-energy on a mesh; nothing is run."""
    import jax
    import jax.numpy as jnp

    far = [d for d in range(-(cfg.bonds // 2), cfg.bonds // 2 + 1) if d]
    neighbours = (np.arange(cfg.atoms)[:, None] + far) % cfg.atoms
    mesh = sharding.make_mesh({"te": cfg.te, "ta": cfg.ta})
    name: Any = "tiles" if scheme == "tiles" else "rounds"
    matrix, tensor = (cfg.orbitals,) * 2, (cfg.directions,) * 2
    with jax.enable_x64(True):
        spread = solvers.spread_self_energy(mesh, neighbours, scheme=name)
        shapes = [
            jax.ShapeDtypeStruct(shape, jnp.complex128)
            for shape in (
                (2, cfg.momenta, cfg.energies, cfg.atoms, *matrix),
                (2, cfg.qs, cfg.frequencies, cfg.atoms, cfg.bonds, *tensor),
                (cfg.atoms, cfg.bonds, cfg.directions, *matrix),
            )
        ]
        lowered = jax.jit(spread).lower(*shapes, 0.1)
        options = compat.quick_compilation(jax.default_backend())
        return lowered.compile(compiler_options=options)


def count_sent(compiled: "Compiled") -> float:
    """Returns the bytes that all devices send, each as often as to other devices."""
    total = 0.0
    for each in perf.collectives(compiled):
        if each.kind == "collective-permute":
            total += each.pair_bytes
        else:
            share = perf.sent_per_byte(each.kind, len(each.groups[0]))
            total += each.total * share * sum(map(len, each.groups))
    return total


def count_needed(cfg: Config, scheme: str) -> float:
    """Counts what devices need of others for the electrons' self-energy.

    The formula's terms, less what a device has itself, what lies beyond the grid's
    ends, and half of the way back: Σ has no neighbours or windows, Π is not computed.
    """
    devices = cfg.te * cfg.ta
    matrix = 2 * 16 * cfg.momenta * cfg.orbitals**2  # of an atom and an energy
    tensors = 2 * 16 * cfg.qs * cfg.bonds * cfg.directions**2  # of an atom and an ω
    grid, held = np.arange(cfg.energies), cfg.energies // devices
    needed = 0
    if scheme == "original":
        for w in range(1, cfg.frequencies + 1):
            up = grid[grid >= w]
            moved = int((up // held != (up - w) // held).sum())
            needed += 2 * moved * cfg.qs * cfg.atoms * matrix
        return needed + (devices - 1) * cfg.frequencies * cfg.atoms * tensors
    own, tile = cfg.atoms // cfg.ta, cfg.energies // cfg.te
    atoms = own + (cfg.bonds if cfg.ta > 1 else 0)
    for row in range(cfg.te):
        first, last = tile * row, tile * (row + 1)
        low, high = first - cfg.frequencies, last + cfg.frequencies
        window = int(((grid >= low) & (grid < high)).sum())
        greens = window * atoms - held * atoms
        back = (tile - held) * own
        needed += cfg.ta * (greens + back) * matrix
    phonons = cfg.frequencies * own * (devices - 1) // devices
    return needed + devices * phonons * tensors
