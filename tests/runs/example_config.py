"""A config with every kind of field, for the tests of this folder."""

import dataclasses
from typing import ClassVar, Literal

from hpcjax.core.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class CosineConfig:
    """Half a cosine.

    Attributes:
      warmup: steps before the peak.
      final: last rate.
    """

    warmup: int = 0
    final: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepsConfig:
    """Falls at steps.

    Attributes:
      at: where it falls.
    """

    at: tuple[float, ...] = (0.5, 0.75)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SgdConfig:
    """SGD.

    Attributes:
      lr: learning rate.
      momentum: decay of
        the buffer.
      schedule: over the run.
    """

    lr: float = 0.1
    momentum: float = 0.9
    schedule: CosineConfig | StepsConfig | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class JorgeConfig:
    """Jorge.

    Attributes:
      lr: learning rate.
      precond_every: steps between updates.
      damping: a number, or found on the way.
    """

    lr: float = 0.05
    precond_every: int = 10
    damping: float | Literal["dynamic"] = 0.1
    schedule: CosineConfig | StepsConfig = CosineConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeedyConfig:
    """Has no default.

    Attributes:
      size: how many.
    """

    size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A network.

    Attributes:
      widths: of the layers.
      kernels: pairs.
      blocks: per stage.
      norm: which.
      name: free text.
      clip: largest norm.
      bias: whether there is one.
      code: a number or a word.
      rules: patterns.
      tags: words.
    """

    widths: tuple[int, ...] = (256, 10)
    kernels: tuple[tuple[int, int], ...] = ((3, 3),)
    blocks: tuple[tuple[int, ...], ...] | None = None
    norm: Literal["batch", "group"] = "batch"
    name: str = "mlp"
    clip: float | None = None
    bias: bool = True
    code: int | str = 3
    rules: tuple[tuple[str, bool], ...] = ()
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if min(self.widths, default=1) < 1:
            raise ConfigError(f"widths must be positive: got {self.widths}")
        if self.name == "refused":
            raise ValueError("name must not be refused")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleConfig:
    """A run.

    Attributes:
      optimizer: what steps.
      model: what learns.
      extra: something optional.
      layers: configs in a row.
      steps: how long.
      seed: of everything.
    """

    resumable: ClassVar[tuple[str, ...]] = ("steps",)

    optimizer: JorgeConfig | SgdConfig = JorgeConfig()
    model: ModelConfig = ModelConfig()
    extra: CosineConfig | NeedyConfig | None = None
    layers: tuple[CosineConfig | StepsConfig, ...] = ()
    steps: int = 400
    seed: int = 0


def run(cfg, ctx):
    """Makes this module an experiment."""
