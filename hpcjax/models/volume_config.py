"""Configs of networks on volumes; importing this module imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from hpcjax.core.config import Decay, Size
from hpcjax.core.objective import Numbers, Objective
from hpcjax.models.model_config import ModelConfig

VOLUME = Numbers(rank=4)  # [depth, height, width, channels]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CosmoFlowConfig(ModelConfig):
    """A network that tells numbers of a cube, see `models.cosmoflow`.

    Attributes:
      variant: "tpds", the paper's; "v2", its later form; or "mlperf".
      width_divisor: what channels are divided by, but for inputs and outputs.
      dropout: probability that an input of a fully connected layer is dropped; none for
        the variant's.
      space: mesh axes over which space is cut; `parallel=spatial` sets it.
    """

    factory: ClassVar[str] = "hpcjax.models._cosmoflow:cosmoflow"
    smoke: ClassVar[Mapping[str, str]] = {"width_divisor": "16"}

    variant: Literal["tpds", "v2", "mlperf"] = "tpds"
    width_divisor: Size = 1
    dropout: Decay | None = None
    space: tuple[str | None, ...] = ()

    @classmethod
    def takes(cls, objective: Objective) -> bool:
        """Says whether it is of numbers of a volume."""
        return objective.maps(VOLUME, Numbers(rank=1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class VolumeUNetConfig(ModelConfig):
    """A U-Net on volumes, logits for each point, see `models.volume_unet`.

    Attributes:
      width_divisor: what channels are divided by, but for inputs and outputs.
      sync_axis: mesh axis over which batch statistics are averaged; None for those of
        the samples of one group of blocks.
      space: mesh axes over which space is cut; `parallel=spatial` sets it.
    """

    factory: ClassVar[str] = "hpcjax.models._volume_unet:volume_unet"
    smoke: ClassVar[Mapping[str, str]] = {"width_divisor": "32"}

    width_divisor: Size = 1
    sync_axis: str | None = None
    space: tuple[str | None, ...] = ()

    @classmethod
    def takes(cls, objective: Objective) -> bool:
        """Says whether it is of numbers for each point of a volume."""
        return objective.maps(VOLUME, VOLUME)
