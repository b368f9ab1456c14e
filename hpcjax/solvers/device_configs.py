"""Configs of devices; importing them imports no JAX."""

import dataclasses
from typing import ClassVar, Literal

from hpcjax.core.config import Config, NotNegative, Positive, Seed, Several, Size


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainConfig(Config):
    """A chain of atoms with one orbital, moving along it.

    Attributes:
      slabs: its atoms.
      hopping: an energy; the band is twice as far to both sides of 0.
      spring: a squared frequency; the largest frequency is twice its root.
    """

    factory: ClassVar[str] = "hpcjax.solvers.devices:chain"

    slabs: Size = 4
    hopping: float = -1.0
    spring: Positive = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RibbonConfig(Config):
    """A ribbon of graphene.

    Attributes:
      slabs: unit cells between the leads.
      width: of zigzag chains, or of pairs across an armchair ribbon.
      edge: along the leads.
      hopping: of nearest neighbours.
      spring: of bonds.
    """

    factory: ClassVar[str] = "hpcjax.solvers.devices:ribbon"

    slabs: Size = 4
    width: Size = 4
    edge: Literal["zigzag", "armchair"] = "zigzag"
    hopping: float = -2.7
    spring: Positive = 0.03


@dataclasses.dataclass(frozen=True, kw_only=True)
class JunctionConfig(Config):
    """A random junction of which no two bonds are alike.

    Attributes:
      atoms: one for each slab.
      orbitals: of an atom.
      directions: in which atoms move.
      momenta: of electrons and of phonons.
      coupling: size of the gradients' entries.
      spring: size of springs.
      seed: of all that is drawn.
    """

    factory: ClassVar[str] = "hpcjax.solvers.devices:junction"

    atoms: Several = 4
    orbitals: Size = 2
    directions: Size = 2
    momenta: tuple[Size, Size] = (1, 1)
    coupling: NotNegative = 0.04
    spring: Positive = 0.0015
    seed: Seed = 0
