"""Codecs of activations that devices send each other; importing this imports no JAX.

Of a matrix whose inputs devices share out each device has a part of a sum, y_i. A codec
replaces the sum of the y_i by one of what decodes from codes E(y_i), which are smaller,
and says what its backward pass is: `grad`. Biases are added behind it, as they are.

Codecs are their own configs: `codec=quantize codec.bits=4` of a training run compresses
the sums of `attention/output` and `mlp/down` in the last half of a stack of layers.
"""

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np

from hpcjax.core import checks, tallies
from hpcjax.core.config import Config, Count, Size
from hpcjax.core.errors import ConfigError

if TYPE_CHECKING:
    import jax

    from hpcjax.core.model import Model

log = logging.getLogger(__name__)

Shape = Sequence[int]
Where = Literal["tensor", "pipeline"]
EntriesT = TypeVar("EntriesT", bound="Entries")
_INDEX = 4  # bytes of an int32
_SCALE = 2  # of a float16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codec(Config):
    """What all codecs have in common; by itself it changes nothing: `Identity`.

    `given` are the codec's own parameters of one layer, as `init` draws them, and
    `{"key": key}` of those that draw. Where a backward pass encodes again what was sent
    to a stage, `given["sent"]` is that code without its floating-point arrays.

    Attributes:
      start: the first layer of a stack whose sums are compressed, of those before it
        all is sent; None for the second half of the layers.
      warmup: steps of training before anything is compressed, in validation too.
    """

    summed: ClassVar[bool] = False  # whether codes are added up, not gathered
    draws: ClassVar[bool] = False
    figures: ClassVar[Mapping[str, str]] = {}  # that a run counts

    start: Count | None = None
    warmup: Count = 0

    def init(self, key: "jax.Array", width: int, dtype: Any = "float32") -> Any:
        """Returns the codec's parameters for activations of a width, `{name: array}`.

        Raises:
          ConfigError: a width that it does not take.
        """
        del key, dtype
        self.check_width(width)
        return {}

    def check_width(self, width: int) -> None:
        """Raises ConfigError for a width that the codec does not take."""

    def encode(self, y: "jax.Array", given: Any) -> Any:
        """Returns the code of `[..., width]`, a tree of arrays.

        Raises:
          ConfigError: activations that the codec does not take.
        """
        del given
        return y

    def decode(self, code: Any, like: Any, given: Any) -> "jax.Array":
        """Returns activations of the shape and dtype of `like`."""
        del given
        return code.astype(like.dtype)

    def sum(self, y: "jax.Array", axes: tuple[str, ...], given: Any) -> "jax.Array":
        """Returns the sum over devices, as decoded, equal on all.

        Args:
          y: this device's part of it, `[..., width]`.
          axes: mesh axes, inside `shard_map`.
          given: parameters and key, equal on all.
        """
        from hpcjax.compress import _codes

        if self.summed:
            return _codes.sum_codes(self, axes, y, given)
        total, counted = _codes.gather_codes(self, axes, y, given)
        tallies.tally(counted)
        return total

    def count(self, codes: Any) -> dict[str, Any]:
        """Returns what is counted, `figures`, of the codes of all devices."""
        del codes
        return {}

    def back(self, slope: "jax.Array", code: Any) -> "jax.Array":
        """Returns the slope of y: all of it, as if nothing had been compressed.

        Args:
          slope: of the sum.
          code: this device's, as far as `keep` keeps it.
        """
        del code
        return slope

    def keep(self, code: Any) -> Any:
        """Returns what the backward pass needs of a code."""
        del code
        return None

    def code_bytes(self, shape: Shape, dtype: Any) -> float:
        """Returns the size of the code of activations."""
        return math.prod(shape) * _size_of(dtype)

    def wire_bytes(
        self, shape: Shape, dtype: Any, devices: int = 2, where: Where = "tensor"
    ) -> float:
        """Returns the bytes that a device sends forward.

        Of t devices that sum activations (`where="tensor"`) each sends 2 (t − 1)/t of
        its code where codes are summed, by a ring, and t − 1 times its code where they
        are gathered. To the next stage of a pipeline it sends its code.

        Args:
          shape: of the activations, such as `[batch, time, width]`.
          dtype: that they would be sent in.
          devices: t.
          where: what is sent.

        Examples:
          >>> Quantizer(bits=4).wire_bytes((32, 512, 1024), "float16", 4)
          25171968.0
        """
        self.check_width(shape[-1])
        code = float(self.code_bytes(shape, dtype))
        if where == "pipeline":
            return code
        rule = "where must be 'tensor' or 'pipeline', and devices at least 1"
        checks.require(
            where == "tensor" and devices >= 1, rule, where=where, devices=devices
        )
        return code * (devices - 1) * (2 / devices if self.summed else 1)

    def slope_bytes(self, shape: Shape, dtype: Any) -> float:
        """Returns the bytes that a stage of a pipeline sends down for what it was sent.

        A code's slope has as many numbers as the code, a quantizer's as its input.
        """
        if getattr(self, "grad", "exact") == "through":
            return float(math.prod(shape) * _size_of(dtype))
        return float(self.code_bytes(shape, dtype))

    def apply_to(self, model: "Model", passes: int = 1) -> "Model":
        """Returns the network whose sums over devices are compressed.

        Its parameters are those of the network and, where the codec learns,
        `codecs/<path of the layer>/<name>`, stacked from `start` on. Where kernels are
        whole there is no sum, and nothing is compressed: a model that has been trained
        with an autoencoder is another one there. What experts sum is never compressed.

        Args:
          model: with a stack of layers.
          passes: of training in a step, each of which `warmup` counts.

        Raises:
          ConfigError: a model without such sums, or of fewer layers than `start`.
        """
        from hpcjax.compress import _codes

        return _codes.compress_sums(model, self, passes)

    def apply_between(self, model: "Model", stages: int, tensor: int = 1) -> "Model":
        """Returns the network that sends codes from stage to stage of a pipeline.

        To those alone whose first layer is `start` or a later one. What the codec
        learns is `codecs/stages/<name>`, with a row for each of these stages. Slopes of
        entries are of what was sent, whose places the sender keeps. Outside of stages
        it is the network without a codec.

        Where devices share the matrices of a stage, sums of layers from `start` on are
        compressed as well, of each micro-batch. What the codec learns for these is
        `<stack>/codecs/<path of the layer>/<name>`, with a row for every layer, of
        which those before `start` are never used.

        Args:
          model: with a `cut` and a stack of layers.
          stages: of equally many layers.
          tensor: devices that share the matrices of a stage.

        Raises:
          ConfigError: a model without these, or in which nothing would be compressed;
            `warmup`, for all steps send the same; `grad="through"` of entries.
        """
        from hpcjax.compress import _boundaries

        self.check_between()
        return _boundaries.compress_between(model, self, stages, tensor)

    def check_between(self) -> None:
        """Raises ConfigError for a codec that stages cannot send each other by."""
        rule = "between stages codec.warmup must be 0"
        checks.require(self.warmup == 0, rule, warmup=self.warmup)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity(Codec):
    """Sends all: the sum without a codec, to the bit."""

    summed: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Autoencoder(Codec):
    """Sends y W_eᵀ, d numbers for `width`, whose sum is the code of the sum.

    W_e `[d, width]` and W_d `[width, d]` are drawn by Xavier's rule and trained with
    the model. The gradient is exact.

    Attributes:
      d: numbers of a code.
    """

    summed: ClassVar[bool] = True

    d: Size = 50
    grad: Literal["exact"] = "exact"

    def check_width(self, width: int) -> None:
        """Says where nothing is compressed."""
        if self.d >= width:
            log.warning("codec.d=%d of width %d compresses nothing", self.d, width)

    def init(self, key: "jax.Array", width: int, dtype: Any = "float32") -> Any:
        """Draws encoder and decoder."""
        from hpcjax.compress import _codes

        self.check_width(width)
        return _codes.draw_autoencoder(key, width, self.d, dtype)

    def encode(self, y: "jax.Array", given: Any) -> Any:
        """Returns `[..., d]`, accumulated in float32, of y's dtype."""
        from hpcjax.compress import _codes

        return _codes.project(y, given["encoder"]).astype(y.dtype)

    def decode(self, code: Any, like: Any, given: Any) -> "jax.Array":
        """Returns code W_dᵀ."""
        from hpcjax.compress import _codes

        return _codes.project(code, given["decoder"]).astype(like.dtype)

    def code_bytes(self, shape: Shape, dtype: Any) -> float:
        """Returns the size of d numbers for each of `width`."""
        return math.prod(shape[:-1]) * self.d * _size_of(dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantizer(Codec):
    """Sends integers of a few bits, packed into bytes, and a scale for each channel.

    With M the largest magnitude of a channel, as float16, and n = 2^(bits - 1):
    q = clip(round(y n / (M + 10⁻⁶)), -n, n - 1), decoded as q M / n. Integers are
    shifted to be unsigned; the last axis is split into 8 / bits chunks, of which the
    first has the highest bits of a byte. Scales above 65,504, float16's largest number,
    are set to it. A run tells how many have been, in all steps, layers and devices.

    Attributes:
      bits: of an integer.
      grad: "through": the slope passes as if nothing had been rounded.
      skip_in_validation: whether validation sends all.
    """

    figures: ClassVar[Mapping[str, str]] = {
        "clamped_scales": ": sent in training that are float16's largest number"
    }

    bits: Literal[2, 4, 8] = 8
    grad: Literal["through"] = "through"
    skip_in_validation: bool = False

    def check_width(self, width: int) -> None:
        """Raises ConfigError unless chunks of the width fill bytes."""
        rule = f"codec.bits={self.bits} packs {8 // self.bits} chunks of the width"
        checks.require(width % (8 // self.bits) == 0, rule, width=width)

    def encode(self, y: "jax.Array", given: Any) -> Any:
        """Returns uint8 `[..., width · bits / 8]` and float16 `[width]`."""
        from hpcjax.compress import _codes

        del given
        self.check_width(y.shape[-1])
        return _codes.quantize(y, self.bits)

    def decode(self, code: Any, like: Any, given: Any) -> "jax.Array":
        """Returns q M / n."""
        from hpcjax.compress import _codes

        del given
        packed, scale = code
        return _codes.dequantize(packed, scale, self.bits).astype(like.dtype)

    def count(self, codes: Any) -> dict[str, Any]:
        """Returns how many scales are as large as float16 has them."""
        from hpcjax.compress import _codes

        largest = codes[1] == _codes.LARGEST
        return {"clamped_scales": largest.sum(dtype="float32")}

    def code_bytes(self, shape: Shape, dtype: Any) -> float:
        """Returns the size of packed integers and scales."""
        del dtype
        return math.prod(shape) * self.bits / 8 + shape[-1] * _SCALE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entries(Codec):
    """Sends k numbers of a whole array and where they are; the devices' are added.

    Attributes:
      k: numbers that are sent.
      grad: "masked" for the slope of what was sent alone, "through" for that of all.
    """

    k: Size = 1
    grad: Literal["masked", "through"] = "through"

    def encode(self, y: "jax.Array", given: Any) -> Any:
        """Returns values and int32 indices, both `[k]`, by ascending index."""
        from hpcjax.compress import _codes

        self.check_entries(y.shape)
        if given.get("sent") is not None:
            places = given["sent"][1]
            return y.reshape(-1)[places], places
        return _codes.choose_entries(y, self.k, given.get("key"))

    def decode(self, code: Any, like: Any, given: Any) -> "jax.Array":
        """Returns the values at their places, and zeros."""
        from hpcjax.compress import _codes

        del given
        values, indices = code
        return _codes.scatter(values, indices, like)

    def check_between(self) -> None:
        """As for all codecs, with slopes of what was sent alone."""
        rule = "between stages the slope is of what was sent: set codec.grad=masked"
        checks.require(self.grad == "masked", rule, grad=self.grad)
        super().check_between()

    def keep(self, code: Any) -> Any:
        """Returns the indices, if the slope is masked by them."""
        return code[1] if self.grad == "masked" else None

    def back(self, slope: "jax.Array", code: Any) -> "jax.Array":
        """Returns the slope, at the indices alone if there are any."""
        from hpcjax.compress import _codes

        if code is None:
            return slope
        return _codes.scatter(slope.reshape(-1)[code], code, slope)

    def code_bytes(self, shape: Shape, dtype: Any) -> float:
        """Returns the size of values and indices."""
        self.check_entries(shape)
        return self.k * (_size_of(dtype) + _INDEX)

    def slope_bytes(self, shape: Shape, dtype: Any) -> float:
        """Returns the size of k numbers, whose places are known, or of all."""
        if self.grad == "through":
            return super().slope_bytes(shape, dtype)
        return float(self.k * _size_of(dtype))

    def check_entries(self, shape: Shape) -> None:
        """Raises ConfigError for more entries than there are."""
        rule = "codec.k must be at most the entries of the activations"
        checks.require(
            self.k <= math.prod(shape), rule, k=self.k, entries=math.prod(shape)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(Entries):
    """Sends the k numbers of largest magnitude, of equal ones those of lower index.

    Attributes:
      skip_in_validation: whether validation sends all.
    """

    skip_in_validation: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomK(Entries):
    """Sends k numbers at random, others on each device, and where they are.

    Places are drawn without replacement by the step's key, the layer's path and number,
    and the device; those of validation are the same ones each time. Nothing is scaled.
    """

    draws: ClassVar[bool] = True


def equal_bytes(
    codec: EntriesT,
    reference: Codec,
    shape: Shape,
    dtype: Any,
    *,
    devices: int = 2,
    where: Where = "tensor",
) -> EntriesT:
    """Returns a codec that sends at most the bytes of another one: its largest k.

    Args:
      codec: sends k numbers.
      reference: the other one.
      shape: of the activations.
      dtype: as for `Codec.wire_bytes`.
      devices: that sum activations.
      where: as for `Codec.wire_bytes`.

    Raises:
      ConfigError: not even one number would be sent.

    Examples:
      >>> shape, one = (32, 512, 1024), Autoencoder(d=50)
      >>> equal_bytes(TopK(), one, shape, "float16", where="pipeline").k
      273066
      >>> equal_bytes(TopK(), one, shape, "float16", devices=4).k
      136533
    """
    unit = dataclasses.replace(codec, k=1)
    size = {"shape": shape, "dtype": dtype, "devices": devices, "where": where}
    given = reference.wire_bytes(**size)
    rule = "there must be at least two devices that send something"
    checks.require(devices > 1 or where == "pipeline", rule, devices=devices)
    return _with_k(codec, math.floor(given / unit.wire_bytes(**size)), shape)


def equal_ratio(codec: EntriesT, reference: Autoencoder, shape: Shape) -> EntriesT:
    """Returns a codec that sends as many numbers as an autoencoder.

    Examples:
      >>> equal_ratio(TopK(), Autoencoder(d=50), (32, 512, 1024)).k
      819200
    """
    return _with_k(codec, math.prod(shape) * reference.d // shape[-1], shape)


def _with_k(codec: EntriesT, k: int, shape: Shape) -> EntriesT:
    if not 1 <= k <= math.prod(shape):
        raise ConfigError(
            "k must be 1 to the entries of the activations: so many bytes are "
            f"k={k}, entries={math.prod(shape)}"
        )
    return dataclasses.replace(codec, k=k)


def _size_of(dtype: Any) -> int:
    return 2 if str(dtype) == "bfloat16" else np.dtype(dtype).itemsize
