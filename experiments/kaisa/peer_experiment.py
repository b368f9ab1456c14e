"""Our K-FAC beside kfac-jax 0.0.8: the same matrices, and the time of a step.

kfac-jax does not work with the JAX that hpcjax needs, so it runs in an environment and
a process of its own and is asked by messages. Of one batch and the same parameters
both give factors and preconditioned gradients; then both take steps, in turns.

Where its definitions differ from ours, they are brought together here:

- its factors of a convolution leave out the number of positions T, which it puts before
  the product A⊗G; KFC's A, ours, contains it.
- its empirical G is N times smaller, for a batch of N: `fisher_empirical` divides by N
  once more. It is given the damping γ/N, and its preconditioned gradient is N times
  ours; its learning rate is divided by N.
- its running averages forget their start by their weights. `factor_ramp` does so too,
  but weighs the second and later batches otherwise; no matrix that is compared here has
  seen a second batch.
"""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from experiments.kaisa.peers import process
from hpcjax import core, perf, runs
from hpcjax.core import config
from hpcjax.core.errors import ConfigError
from hpcjax.optim import SgdConfig
from hpcjax.optim.kfac import KfacConfig

if TYPE_CHECKING:
    from experiments.kaisa.peer_side import Side

    Arrays = Mapping[str, np.ndarray]

COMMAND = "make .cache/peers/kfac-jax"
_HERE = pathlib.Path(__file__).resolve()
PYTHON = _HERE.parents[2] / ".cache/peers/kfac-jax/bin/python"
WORKER = _HERE.parent / "peers/kfac_jax_worker.py"
MOMENTUM = 0.9
MODES = {"empirical": "fisher_empirical", "exact": "fisher_exact"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A network, a batch and how both are measured.

    Attributes:
      problem: an MLP, or 3x3 convolutions of stride 2 and a dense layer.
      widths: of the hidden layers: units, or channels.
      inputs: height, width and channels of the images, which are random.
      classes: number of classes.
      batch_size: images in a step.
      method: `"eigen"`, exact for A⊗G + γI, or `"inverse"` of factors with π-damping.
      fisher: at which labels G is taken.
      damping: γ.
      lr: learning rate of the steps, whose momentum is `MOMENTUM`.
      factor_update_steps: steps between updates of the factors.
      inv_update_steps: steps between inversions, and steps in one measurement.
      repetitions: rounds; in each, both take so many steps.
      python: interpreter that has kfac-jax; empty for that of `COMMAND`.
      seed: of parameters and images.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "widths": "[4]",
        "inputs": "[6,6,1]",
        "classes": "3",
        "batch_size": "4",
        "factor_update_steps": "1",
        "inv_update_steps": "2",
        "repetitions": "2",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "difference": "quantity: relative, the largest of all layers",
        "seconds": "candidate repetition: of a step",
    }

    problem: Literal["mlp", "conv"] = "mlp"
    widths: tuple[int, ...] = (256, 128)
    inputs: tuple[int, int, int] = (28, 28, 1)
    classes: int = 10
    batch_size: config.Size = 128
    method: Literal["eigen", "inverse"] = "eigen"
    fisher: Literal["empirical", "exact"] = "empirical"
    damping: float = 0.03
    lr: float = 1e-4
    factor_update_steps: int = 10
    inv_update_steps: int = 100
    repetitions: config.Several = 10
    python: str = ""
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.optimizer()

    def optimizer(self) -> KfacConfig:
        """Returns our side's K-FAC: its first batch replaces the averages' start."""
        return KfacConfig(
            base=SgdConfig(lr=self.lr, momentum=MOMENTUM),
            damping=self.damping,
            factor_ramp=True,
            factor_update_steps=self.factor_update_steps,
            inv_update_steps=self.inv_update_steps,
            kl_clip=None,
            method=self.method,
            pi_damping=self.method == "inverse",
            fisher=self.fisher,
        )

    @property
    def divisor(self) -> int:
        """By how much kfac-jax's G is smaller than ours."""
        return self.batch_size if self.fisher == "empirical" else 1

    def request(self, model: "core.Model") -> dict[str, Any]:
        """Returns what the peer must know to set up the same problem."""
        kept = ("strides", "padding")
        return {
            "layers": [
                {name: spec.options[name] for name in kept if name in spec.options}
                | {"path": spec.path, "kind": spec.kind}
                for spec in model.layers
            ],
            "method": self.method,
            "estimation_mode": MODES[self.fisher],
            "damping": self.damping / self.divisor,
            "learning_rate": self.lr / self.divisor,
            "momentum": MOMENTUM,
            "factor_update_steps": self.factor_update_steps,
            "inv_update_steps": self.inv_update_steps,
        }

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {
            "quantity": (
                "gradient",
                "preconditioned",
                "a",
                "g",
                "change",
                "raw",
                "one_more",
            ),
            "candidate": ("kfac-jax", "hpcjax", "hpcjax, checked"),
            "repetition": range(self.repetitions),
        }


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Compares matrices and steps, then times both in turns.

    A block of the peer's steps is timed from here, so that a message and its answer are
    in it: a millisecond among hundreds.
    """
    import jax
    import xarray as xr

    from experiments.kaisa.peer_side import Side

    if jax.default_backend() != "cpu":
        raise ConfigError(
            "kfac-jax is compared on the CPU, set JAX_PLATFORMS=cpu: got "
            f"{jax.default_backend()}"
        )
    count = cfg.inv_update_steps
    with process.start(pathlib.Path(cfg.python or PYTHON), WORKER, COMMAND) as peer:
        versions = peer.ask("versions")
        side = Side(cfg)
        peer.ask("problem", cfg.request(side.model), side.arrays())
        found = compare(side, peer, cfg)

        def theirs() -> None:
            peer.ask("steps", count)

        measured = perf.compare(
            {
                "kfac-jax": theirs,
                "hpcjax": side.steps(count, check=False),
                "hpcjax, checked": side.steps(count, check=True),
            },
            "kfac-jax",
            repetitions=cfg.repetitions,
            warmup=1,
        )
    difference = xr.DataArray(
        list(found.values()), dims="quantity", coords={"quantity": list(found)}
    )
    return runs.measured(
        {"difference": difference, "seconds": measured["seconds"] / count},
        attrs={"peer": ", ".join(f"{name} {v}" for name, v in versions.items())},
    )


def compare(side: "Side", peer: process.Peer, cfg: Config) -> dict[str, float]:
    """Returns the relative differences of what both make of the same problem.

    Of `gradient`, factors `a` and `g`, `preconditioned` gradient, and `change`: what
    the first `inv_update_steps` steps add to the parameters. And for control of `raw`,
    our gradient beside their preconditioned one, and `one_more`, our change by one step
    more beside theirs.
    """
    count = cfg.inv_update_steps
    theirs = in_our_terms(peer.ask("curvature"), cfg.divisor)
    change = peer.ask("change", count)
    ours = side.curvature()
    return {
        **differences({**ours, **side.change(count)}, {**theirs, **change}),
        **_control("raw", ours, "gradient", theirs, "preconditioned"),
        **_control("one_more", side.change(count + 1), "change", change, "change"),
    }


def _control(
    name: str, ours: "Arrays", mine: str, theirs: "Arrays", other: str
) -> dict[str, float]:
    """Returns the difference of two kinds of arrays that are not the same, by name."""
    pair = (
        {
            path.replace(kind, name, 1): array
            for path, array in arrays.items()
            if path.startswith(f"{kind}/")
        }
        for arrays, kind in ((ours, mine), (theirs, other))
    )
    return differences(*pair)


def in_our_terms(arrays: "Arrays", divisor: int) -> "dict[str, np.ndarray]":
    """Returns the peer's matrices by our definitions.

    Args:
      arrays: what it answered to `curvature`.
      divisor: by how much its G is smaller.
    """
    found = {}
    for name, array in arrays.items():
        kind, _, path = name.partition("/")
        if kind == "a":
            found[name] = array * arrays[f"scale/{path}"]
        elif kind == "g":
            found[name] = array * divisor
        elif kind == "preconditioned":
            found[name] = array / divisor
        elif kind != "scale":
            found[name] = array
    return found


def differences(ours: "Arrays", theirs: "Arrays") -> dict[str, float]:
    """Returns ‖ours − theirs‖ / ‖theirs‖ for each kind of array, the largest of all.

    Raises:
      ValueError: they are not the same arrays.
    """
    if set(ours) != set(theirs):
        raise ValueError(f"only on one side: {sorted(set(ours) ^ set(theirs))}")
    found: dict[str, float] = {}
    for name, array in theirs.items():
        kind = name.partition("/")[0]
        far = float(np.linalg.norm(ours[name] - array))
        size = float(np.linalg.norm(array))
        ratio = far / size if size > 0 else (math.inf if far > 0 else 0.0)
        found[kind] = max(found.get(kind, 0.0), ratio)
    return found
