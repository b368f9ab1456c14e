"""Networks that predict fields, and know or do not know where a point is."""

import itertools
from collections.abc import Mapping
from typing import Any, Literal

import jax
from flax import nnx

from hpcjax import layers
from hpcjax.core import checks
from hpcjax.core.config import check_fields
from hpcjax.core.dtypes import Policy
from hpcjax.core.errors import ConfigError
from hpcjax.core.keys import Key
from hpcjax.core.model import Model
from hpcjax.layers import Damping, ExpertProducts, GlobePadding, RoutingLoss
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models._postprocess import check_inputs, correct
from hpcjax.models.modules import (
    FLOAT32,
    HE_FAN_OUT,
    ZEROS,
    Conv,
    Initializer,
    param,
)
from hpcjax.models.spatial_config import (
    CnnConfig,
    LocallyConnectedConfig,
    SmoeConfig,
)

ROUTING_LOSS, DAMPING = RoutingLoss(), Damping()
# Of every point on its own: the height and width of the kernels' grid are no fan.
HE_EACH_POINT: Initializer = nnx.initializers.variance_scaling(
    2.0, "fan_in", "uniform", in_axis=-2, out_axis=-1, batch_axis=(0, 1)
)


def check_field(inputs: Any, outputs: int) -> None:
    """Raises ConfigError unless inputs are (height, width, channels)."""
    if len(inputs) != 3 or min(*inputs, outputs) < 1:
        raise ConfigError(
            "inputs must be (height, width, channels) and outputs the number of "
            f"variables, at least 1: got inputs={inputs}, outputs={outputs}"
        )


class _Convolutions(nnx.Module):
    """Convolutions with biases; a ReLU after each."""

    def __init__(self, sizes: tuple[int, ...], kernel_size: int, policy: Policy):
        self.depth = len(sizes) - 1
        for index, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
            conv = Conv(
                fan_in, fan_out, kernel_size=kernel_size, use_bias=True, policy=policy
            )
            setattr(self, f"conv_{index}", conv)

    def __call__(self, x: jax.Array) -> jax.Array:
        for index in range(self.depth):
            x = jax.nn.relu(getattr(self, f"conv_{index}")(x))
        return x


class _Cnn(nnx.Module):
    """The network of `cnn`."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        outputs: int,
        kernel_size: int,
        coordinates: bool,
        residual: bool,
        policy: Policy,
    ):
        sizes = (sizes[0] + 2 * coordinates, *sizes[1:])
        self.coordinates, self.residual = coordinates, residual
        self.output = policy.output
        self.hidden = _Convolutions(sizes, kernel_size, policy)
        self.head = Conv(
            sizes[-1],
            outputs,
            kernel_size=kernel_size,
            use_bias=True,
            initializer=ZEROS if residual else HE_FAN_OUT,
            policy=policy,
        )

    def __call__(self, x: jax.Array, *, train: bool, key: Key | None) -> jax.Array:
        del train, key
        given = layers.add_coordinates(x) if self.coordinates else x
        y = self.head(self.hidden(given))
        return (x + y if self.residual else y).astype(self.output)


def cnn(
    inputs: tuple[int, ...],
    outputs: int,
    *,
    kernel_size: int = 3,
    widths: tuple[int, ...] = (4,),
    coordinates: bool = False,
    residual: bool = False,
    policy: Policy = FLOAT32,
) -> Model:
    """Returns convolutions of one size, with ReLUs between them.

    Without coordinates it does the same at all points but those at the border.

    Args:
      inputs: (height, width, channels).
      outputs: variables.
      kernel_size: of all convolutions, odd.
      widths: channels of the hidden layers.
      coordinates: whether row and column, from −1 to 1, are added to the input.
      residual: whether the input is added to the output, which then is its change, and
        none at first.
      policy: dtypes of parameters, products and outputs.

    Raises:
      ConfigError: inputs that are no field, an even kernel_size, or a change of other
        variables than the input's.

    Examples:
      >>> from hpcjax import models
      >>> models.num_params(cnn((8, 8, 1), 1))
      77
    """
    check_field(inputs, outputs)
    check_fields(CnnConfig, widths=widths)
    CnnConfig(kernel_size=kernel_size)
    rule = "a change has the variables of the input"
    same = not residual or inputs[-1] == outputs
    checks.require(same, rule, channels=inputs[-1], outputs=outputs)
    sizes = (inputs[-1], *widths)
    return from_nnx(
        lambda: _Cnn(sizes, outputs, kernel_size, coordinates, residual, policy)
    )


class _LocallyConnected(nnx.Module):
    """The network of `locally_connected`."""

    def __init__(
        self, inputs: tuple[int, ...], outputs: int, kernel_size: int, policy: Policy
    ):
        *places, channels = inputs
        shape = (*places, kernel_size, kernel_size, channels, outputs)
        self.kernel = param(shape, HE_EACH_POINT, policy.param)
        self.compute, self.output = policy.compute, policy.output

    def __call__(self, x: jax.Array, *, train: bool, key: Key | None) -> jax.Array:
        del train, key
        y = layers.locally_connected(x, self.kernel[...], compute=self.compute)
        return y.astype(self.output)


def locally_connected(
    inputs: tuple[int, ...],
    outputs: int,
    *,
    kernel_size: int = 3,
    policy: Policy = FLOAT32,
) -> Model:
    """Returns one linear layer whose filters differ from point to point.

    Args:
      inputs: (height, width, channels).
      outputs: variables.
      kernel_size: of the filters, odd.
      policy: dtypes of parameters, products and outputs.

    Raises:
      ConfigError: inputs that are no field, or an even kernel_size.

    Examples:
      >>> from hpcjax import models
      >>> models.num_params(locally_connected((8, 8, 1), 1))
      576
    """
    check_field(inputs, outputs)
    LocallyConnectedConfig(kernel_size=kernel_size)
    return from_nnx(lambda: _LocallyConnected(inputs, outputs, kernel_size, policy))


class _Smoe(nnx.Module):
    """The network of `smoe`, of fields or, with a Gaussian of them, of forecasts."""

    def __init__(
        self, inputs: tuple[int, ...], outputs: int, cfg: SmoeConfig, policy: Policy
    ):
        *places, channels = inputs
        sizes, count = (channels, *cfg.widths), cfg.experts * outputs
        self.outputs, self.options = outputs, nnx.static(cfg)
        self.compute, self.output = policy.compute, policy.output
        self.hidden = _Convolutions(sizes, cfg.kernel_size, policy)
        shape = (cfg.kernel_size, cfg.kernel_size, sizes[-1], count)
        init = nnx.initializers.variance_scaling(
            2.0 * cfg.filter_scale**2, "fan_in", "uniform"
        )
        self.kernel = param(shape, init, policy.param)
        if cfg.gate == "tensor":
            bound = cfg.gate_scale * (3 * cfg.experts) ** 0.5
            self.gate: Any = param((*places, count), _uniform(bound), policy.param)
        else:
            wide = sizes[-1] + 2 * (cfg.gate == "coord_conv")
            self.gate = Conv(
                wide, count, kernel_size=cfg.kernel_size, use_bias=True, policy=policy
            )

    def _find_gate(self, x: jax.Array) -> jax.Array:
        if self.options.gate == "tensor":
            return self.gate[...]
        given = layers.add_coordinates if self.options.gate == "coord_conv" else None
        return self.gate(x if given is None else given(x))

    def __call__(self, x: Any, *, train: bool, key: Key | None) -> Any:
        del train, key
        cfg: SmoeConfig = self.options
        forecast = isinstance(x, Mapping)
        field = self.hidden(x["fields"] if forecast else x)
        y = layers.spatial_experts(
            field,
            self.kernel[...],
            self._find_gate(field),
            self.outputs,
            weighted=cfg.weighted,
            routing_loss=cfg.routing_loss,
            damping=cfg.damping,
            padding=cfg.padding,
            products=cfg.products,
            compute=self.compute,
        )
        return correct(x, y) if forecast else y.astype(self.output)


def _uniform(bound: float) -> Initializer:
    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def smoe(  # noqa: PLR0913 - an argument for each option
    inputs: Any,
    outputs: int,
    *,
    kernel_size: int = 3,
    widths: tuple[int, ...] = (),
    experts: int = 3,
    gate: Literal["tensor", "conv", "coord_conv"] = "tensor",
    weighted: bool = False,
    routing_loss: RoutingLoss | None = ROUTING_LOSS,
    damping: Damping | None = DAMPING,
    padding: GlobePadding = "zero",
    products: ExpertProducts = "dense",
    filter_scale: float = 1.0,
    gate_scale: float = 1.0,
    policy: Policy = FLOAT32,
) -> Model:
    """Returns a spatial mixture of experts, which learns what applies where.

    The last layer is `layers.spatial_experts` with `experts` filters for each output,
    and without `widths` the only one. A gate that is a tensor starts uniform in
    ±√(3 experts). Of forecasts with members it takes the fields, and puts out a
    Gaussian, as ENS-10's networks do.

    Args:
      inputs: (height, width, channels), or shapes of "members" and "fields".
      outputs: variables; 2 of forecasts.
      kernel_size: of all filters, odd.
      widths: channels of ordinary convolutions before the layer, each with a ReLU.
      experts: |E|/e, filters to choose from for each output.
      gate: "tensor", "conv" or "coord_conv".
      weighted: whether outputs are multiplied by their gates.
      routing_loss: how gates learn; None: by the task's gradient.
      damping: of gradients where errors are large; None for none.
      padding: of the width.
      products: "dense" or "gather".
      filter_scale: of the filters' first values, over He's uniform ones.
      gate_scale: of a tensor's first gates, over those above.
      policy: dtypes of parameters, products and outputs.

    Raises:
      ConfigError: inputs of no known form, or a value that no config may have.

    References:
      Dryden, Hoefler, Spatial Mixture-of-Experts, NeurIPS 2022.

    Examples:
      >>> params, _ = smoe((64, 64, 1), 1).init(jax.random.key(0))
      >>> jax.tree.map(lambda each: each.shape, params)
      {'gate': (64, 64, 3), 'kernel': (3, 3, 1, 3)}
    """
    cfg = SmoeConfig(
        kernel_size=kernel_size,
        widths=widths,
        experts=experts,
        gate=gate,
        weighted=weighted,
        routing_loss=routing_loss,
        damping=damping,
        padding=padding,
        products=products,
        filter_scale=filter_scale,
        gate_scale=gate_scale,
    )
    if isinstance(inputs, Mapping):
        inputs = check_inputs(inputs)["fields"]
    check_field(inputs, outputs)
    return from_nnx(lambda: _Smoe(inputs, outputs, cfg, policy))
