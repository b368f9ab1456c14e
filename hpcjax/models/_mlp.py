"""The multilayer perceptron."""

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import jax
from flax import nnx

from hpcjax import layers
from hpcjax.core import checks
from hpcjax.core.config import check_fields
from hpcjax.core.dtypes import Policy
from hpcjax.core.keys import Key
from hpcjax.core.model import Model
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models.mlp_config import MlpConfig
from hpcjax.models.modules import FLOAT32, Dense, HeadInit, head_initializer

Activation = Literal["relu", "tanh", "gelu_tanh"]


class _Mlp(nnx.Module):
    """The network of `mlp`."""

    def __init__(
        self,
        sizes: Sequence[int],
        outputs: int,
        activation: Activation,
        head_init: HeadInit,
        policy: Policy,
    ):
        self.activation = activation
        self.hidden = len(sizes) - 1
        for index, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
            setattr(self, f"dense_{index}", Dense(fan_in, fan_out, policy=policy))
        self.head = Dense(
            sizes[-1],
            outputs,
            policy=policy,
            initializer=head_initializer(head_init),
            output=policy.output,
        )

    def __call__(self, x: jax.Array, *, train: bool, key: Key | None) -> jax.Array:
        del train, key
        x = x.reshape(x.shape[0], -1)
        for index in range(self.hidden):
            x = getattr(self, f"dense_{index}")(x)
            x = layers.activation(self.activation, x)
        return self.head(x)


def mlp(
    inputs: tuple[int, ...],
    outputs: int,
    *,
    widths: tuple[int, ...] = (256,),
    activation: Activation = "relu",
    head_init: HeadInit = "lecun",
    policy: Policy = FLOAT32,
) -> Model:
    """Returns a multilayer perceptron on flattened inputs.

    Args:
      inputs: shape of one example.
      outputs: number of logits.
      widths: sizes of the hidden layers `dense_0`, `dense_1`, ...; may be empty.
      activation: "relu", "tanh" or "gelu_tanh", after every hidden layer.
      head_init: kernel of the last layer `head`: "lecun" or "zeros".
      policy: dtypes of parameters, products and logits.

    Raises:
      ConfigError: a width below 1, or an unknown activation or head_init.

    Examples:
      >>> [spec.path for spec in mlp((8, 8, 1), 10, widths=(16,)).layers]
      ['dense_0', 'head']
    """
    options = {"widths": widths, "activation": activation, "head_init": head_init}
    check_fields(MlpConfig, **options)
    size = math.prod(inputs)
    rule = "inputs and outputs must be at least 1"
    checks.require(min(size, outputs) >= 1, rule, inputs=inputs, outputs=outputs)
    return from_nnx(
        lambda: _Mlp((size, *widths), outputs, activation, head_init, policy)
    )
