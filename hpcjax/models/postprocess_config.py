"""Configs of models that post-process ensembles; importing this imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from hpcjax.core.config import Count, NotNegative, Size, Within
from hpcjax.core.objective import Objective
from hpcjax.models.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PostprocessConfig(ModelConfig):
    """Base of models that predict Gaussians from the members of a forecast."""

    @classmethod
    def takes(cls, objective: Objective) -> bool:
        """Says whether it is of forecasts with members."""
        return objective.name == "postprocessing"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RawConfig(PostprocessConfig):
    """The ensemble as it is: a Gaussian of its mean and deviation; nothing is learnt.

    See `models.raw_ensemble`.
    """

    factory: ClassVar[str] = "hpcjax.models._postprocess:raw_ensemble"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmosConfig(PostprocessConfig):
    """Ensemble model output statistics, see `models.emos`.

    Attributes:
      variant: "gneiting2005", four coefficients of mean and variance; "ens10", that
        benchmark's linear corrections by each member and by the deviation;
        "climatology", mean and deviation alone, which no member changes.
      per_point: whether each point of the grid has coefficients of its own.
      jitter: standard deviation of what is added to the first coefficients, to start
        from several places.
    """

    factory: ClassVar[str] = "hpcjax.models._postprocess:emos"

    variant: Literal["gneiting2005", "ens10", "climatology"] = "gneiting2005"
    per_point: bool = False
    jitter: NotNegative = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PointMlpConfig(PostprocessConfig):
    """A perceptron of the fields at a point, the same for all, see `models.point_mlp`.

    Attributes:
      widths: sizes of the hidden layers.
    """

    factory: ClassVar[str] = "hpcjax.models._postprocess:point_mlp"
    smoke: ClassVar[Mapping[str, str]] = {"widths": "[4]"}

    widths: tuple[Size, ...] = (128,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldCnnConfig(PostprocessConfig):
    """Two convolutions and a perceptron of each point, see `models.field_cnn`.

    Attributes:
      width: channels.
      padding: of longitudes.
    """

    factory: ClassVar[str] = "hpcjax.models._postprocess:field_cnn"
    smoke: ClassVar[Mapping[str, str]] = {"width": "2"}

    width: Size = 32
    padding: Literal["periodic", "zero"] = "periodic"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldUNetConfig(PostprocessConfig):
    """ENS-10's U-Net, see `models.field_unet`.

    Attributes:
      width: channels of the first level, doubled at each of two halvings.
      padding: of longitudes; ENS-10's has "zero".
    """

    factory: ClassVar[str] = "hpcjax.models._field_unet:field_unet"
    smoke: ClassVar[Mapping[str, str]] = {"width": "2"}

    width: Size = 32
    padding: Literal["periodic", "zero"] = "periodic"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemberAttentionConfig(PostprocessConfig):
    """A Transformer across members, see `models.member_attention`.

    Attributes:
      width: channels, and heads of the attention.
      blocks: attention blocks.
      padding: of longitudes.
    """

    factory: ClassVar[str] = "hpcjax.models._member_attention:member_attention"
    smoke: ClassVar[Mapping[str, str]] = {"width": "2"}

    width: Size = 64
    blocks: Size = 1
    padding: Literal["periodic", "zero"] = "periodic"


@dataclasses.dataclass(frozen=True, kw_only=True)
class UNet3dConfig(PostprocessConfig):
    """A U-Net of levels that predicts the spread alone, see `models.unet3d`.

    Attributes:
      base: half of the channels of the first level; others are multiples.
      poolings: halvings of latitudes and longitudes.
      padding: of longitudes; the paper's is "zero".
      positive: what keeps the spread above zero; the paper's is "none".
      crop: whether rows and columns that do not divide stay as they are.
      remat: whether activations are computed again for gradients.
    """

    factory: ClassVar[str] = "hpcjax.models._spread_nets:unet3d"
    smoke: ClassVar[Mapping[str, str]] = {"base": "1", "poolings": "1", "crop": "true"}

    base: Size = 32
    poolings: Annotated[int, Within("[1, 5]")] = 5
    padding: Literal["periodic", "zero"] = "periodic"
    positive: Literal["softplus", "none"] = "softplus"
    crop: bool = False
    remat: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvLstmConfig(PostprocessConfig):
    """A convolutional LSTM of leads, for the spread alone; see `models.conv_lstm`.

    Attributes:
      width: channels.
      poolings: halvings before the leads are joined.
      padding: of longitudes.
      crop: whether rows and columns that do not divide stay as they are.
      remat: whether activations are computed again for gradients.
    """

    factory: ClassVar[str] = "hpcjax.models._spread_nets:conv_lstm"
    smoke: ClassVar[Mapping[str, str]] = {"width": "2", "poolings": "0"}

    width: Size = 64
    poolings: Count = 1
    padding: Literal["periodic", "zero"] = "periodic"
    crop: bool = False
    remat: bool = False
