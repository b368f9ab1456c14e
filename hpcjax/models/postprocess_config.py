"""Configs of models that post-process ensembles; importing this imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from hpcjax.core import checks
from hpcjax.core.config import Config, Count, NotNegative, Size, Within
from hpcjax.core.objective import Objective
from hpcjax.core.parts import Part
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
      variant: "gneiting2005", four coefficients of mean and variance; "softplus", those
        of the variance by softplus, not by squares; "ens10", that benchmark's linear
        corrections by each member and by the deviation; "climatology", mean and
        deviation alone, which no member changes.
      per_point: whether each point of the grid has coefficients of its own.
      jitter: standard deviation of what is added to the first coefficients, to start
        from several places.
    """

    factory: ClassVar[str] = "hpcjax.models._postprocess:emos"

    variant: Literal["gneiting2005", "softplus", "ens10", "climatology"] = (
        "gneiting2005"
    )
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
    positive: Literal["softplus", "abs", "none"] = "softplus"
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LcnConfig(Config):
    """A head that weighs features at each place in its own way.

    Attributes:
      alpha: of what weights of neighbours differ by, which is added to the loss.
      kernel: points a side of what a place's weights see; odd.
      lat_wrap: whether the poles are neighbours.
      paper_code: whether alpha is left out and the poles are neighbours, the published
        code's faults.
    """

    alpha: NotNegative = 10.0
    kernel: Size = 1
    lat_wrap: bool = False
    paper_code: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "kernel must be odd, to have a middle"
        checks.require(self.kernel % 2 == 1, rule, kernel=self.kernel)


BY_PLACE = LcnConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class BiasUNetConfig(PostprocessConfig):
    """A U-Net that corrects the mean, with a head by place; see `models.bias_unet`.

    Attributes:
      levels: halvings; without there are four convolutions.
      filters: channels of the first convolution.
      features: what the head by place weighs.
      lcn: the head by place; none for one output.
      norm: before each ReLU.
      padding: of longitudes; the paper's is "zero".
      coordinates: whether convolutions see the place.
      crop: whether rows and columns that do not divide stay as they are.
    """

    factory: ClassVar[str] = "hpcjax.models._bias_unet:bias_unet"
    smoke: ClassVar[Mapping[str, str]] = {"levels": "0", "filters": "1"}

    levels: Annotated[int, Within("[0, 3]")] = 2
    filters: Size = 32
    features: Size = 7
    lcn: LcnConfig | None = BY_PLACE
    norm: Literal["batch", "group", "none"] = "batch"
    padding: Literal["periodic", "zero"] = "periodic"
    coordinates: bool = False
    crop: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpreadNetConfig(PostprocessConfig):
    """Inception blocks that predict the spread alone, see `models.spread_net`.

    Attributes:
      variant: "resnet2d", the paper's, or "simple", its later one.
      base: channels of the first convolution; others follow.
      blocks: how many; none for the variant's.
      positive: what keeps the spread above zero; the paper's is "abs".
      norm: before each ReLU.
      padding: of longitudes; the paper's is "zero".
      remat: whether activations are computed again for gradients.
    """

    factory: ClassVar[str] = "hpcjax.models._spread_net:spread_net"
    smoke: ClassVar[Mapping[str, str]] = {"base": "2", "blocks": "1"}

    variant: Literal["resnet2d", "simple"] = "resnet2d"
    base: Size = 64
    blocks: Size | None = None
    positive: Literal["softplus", "abs", "none"] = "softplus"
    norm: Literal["batch", "group", "none"] = "batch"
    padding: Literal["periodic", "zero"] = "periodic"
    remat: bool = False


BIAS, INCEPTION = BiasUNetConfig(), SpreadNetConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanAndSpreadConfig(PostprocessConfig):
    """The mean of one model and the spread of another, see `models.mean_and_spread`.

    `dataset.learn=both` trains each by its own loss, `joint` then the spread alone,
    around means of dates that they have not learnt (`dataset.folds`).

    Attributes:
      mean: what puts out μ.
      spread: what puts out σ.
    """

    factory: ClassVar[str] = "hpcjax.models._mean_and_spread:mean_and_spread"

    mean: Annotated[Any, Part("model")] = BIAS
    spread: Annotated[Any, Part("model")] = INCEPTION

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mean", "spread"):
            own = getattr(self, name)
            rule = f"{name} must be a model of forecasts, and no pair of them"
            good = isinstance(own, PostprocessConfig)
            good &= not isinstance(own, MeanAndSpreadConfig)
            checks.require(good, rule, **{name: type(own).__name__})
