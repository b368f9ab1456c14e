"""A mixture of experts as the feed-forward part of a transformer block."""

import jax
import jax.numpy as jnp
from flax import nnx

from hpcjax import layers
from hpcjax.core import shards
from hpcjax.core.dtypes import Policy
from hpcjax.core.keys import Key, each_row
from hpcjax.core.varying import varying_axes
from hpcjax.models.modules import ZEROS, Dense, Initializer, Loss, loss, param
from hpcjax.models.transformer_config import TransformerOptions


class ExpertMatrices(nnx.Module):
    """The parameters of all experts' feed-forward networks.

    `up` and, if gated, `gate` are [experts, width, mlp_width]; `down` is
    [experts, mlp_width, width]; `up_bias` and so on are [experts, outputs].
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        options: TransformerOptions,
        policy: Policy,
        inner: Initializer,
        residual: Initializer,
    ):
        """Declares the parameters of `sizes`, (experts, width, mlp_width)."""
        count, width, mlp_width = sizes
        self.gated = options.mlp == "silu_gated"
        self.activation = "silu" if self.gated else options.mlp

        def bias(outputs: int) -> nnx.Param | None:
            return (
                param((count, outputs), ZEROS, policy.param)
                if options.use_bias
                else None
            )

        self.up = param((count, width, mlp_width), inner, policy.param)
        self.down = param((count, mlp_width, width), residual, policy.param)
        self.up_bias, self.down_bias = bias(mlp_width), bias(width)
        if self.gated:
            self.gate = param((count, width, mlp_width), inner, policy.param)
            self.gate_bias = bias(mlp_width)

    def __call__(self, rows: jax.Array, dense: layers.ExpertDense) -> jax.Array:
        """Applies to each row the network of its expert, see `layers.experts`."""

        def apply(x: jax.Array, kernel: nnx.Param, bias: nnx.Param | None) -> jax.Array:
            added = None if bias is None else bias.get_value()
            return dense(x, kernel.get_value(), added)

        if self.gated:
            both = [self.up.get_value(), self.gate.get_value()]
            rows = layers.share_inputs(rows, both)
        y = apply(rows, self.up, self.up_bias)
        if self.gated:
            gate = apply(rows, self.gate, self.gate_bias)
            y = layers.activation(self.activation, gate) * y
        else:
            y = layers.activation(self.activation, y)
        return apply(y, self.down, self.down_bias)


class ExpertsFeedForward(nnx.Module):
    """Σⱼ gateⱼ · expert_{eⱼ}(x), summed over the top-k experts that `router` chooses.

    It adds the losses `balance` and `router_z` to the objective, see `ExpertsConfig`.
    """

    def __init__(
        self,
        width: int,
        mlp_width: int,
        options: TransformerOptions,
        policy: Policy,
        inner: Initializer,
        residual: Initializer,
    ):
        """Declares `router` and `experts`; `residual` is the initializer of `down`."""
        if options.experts is None:
            raise ValueError("the options name no experts")
        self.config = options.experts
        count = self.config.count
        self.router = Dense(
            width,
            count,
            policy=Policy(param=policy.param),
            use_bias=False,
            initializer=inner,
        )
        self.experts = ExpertMatrices(
            (count, width, mlp_width), options, policy, inner, residual
        )
        self.balance, self.router_z = loss(), loss()
        self.compute = policy.compute

    def __call__(self, x: jax.Array, key: Key | None = None) -> jax.Array:
        """Maps `[batch, time, width]` to the same shape.

        Args:
          x: inputs.
          key: for the draw of which tokens keep a place, in training.
        """
        config, rows = self.config, x.reshape(-1, x.shape[-1])
        # The router sees `[batch, time, width]`, as the other matrices of the block do,
        # so that its tap has statistics of the same form.
        logits = self.router(x).reshape(-1, config.count)
        routing = layers.route(logits, config.top_k)
        self._set_losses(routing, logits)
        y = layers.experts(
            rows.astype(self.compute),
            routing,
            self.experts,
            capacity=self._capacity(len(rows)),
            priority=self._priority(routing, key, len(x)),
            like=self.experts.up.get_value(),
            compute=self.compute,
        )
        return y.reshape(x.shape)

    def _set_losses(self, routing: layers.Routing, logits: jax.Array) -> None:
        """Adds the losses of the router to the objective."""
        config = self.config
        # Devices that share out the experts of one model share out its batch. What
        # each of them has of the balance says nothing: only the product of all's does.
        spread = isinstance(self.experts.up.get_value(), shards.Part)
        axes = tuple(sorted(varying_axes(logits))) if spread else ()
        balance = layers.load_balance_loss(routing, axis_name=axes or None)
        self._put(self.balance, config.balance_weight, balance)
        self._put(self.router_z, config.router_z_weight, layers.router_z_loss(logits))

    def _capacity(self, tokens: int) -> int | None:
        config = self.config
        if config.capacity_factor is None:
            return None
        return layers.expert_capacity(
            tokens, config.count, config.top_k, config.capacity_factor
        )

    def _priority(
        self, routing: layers.Routing, key: Key | None, rows: int
    ) -> jax.Array | None:
        """Returns the priority of choices; None for the order of tokens."""
        if self.config.priority == "probability":
            likely = routing.probabilities
            return jnp.take_along_axis(likely, routing.experts, axis=1)
        if self.config.priority == "random" and key is not None:
            # A row of the batch draws for its own tokens.
            tokens, choices = routing.experts.shape
            shape = tokens // rows, choices
            keys = each_row(key, rows)
            drawn = jax.vmap(lambda key: jax.random.uniform(key, shape))(keys)
            return drawn.reshape(tokens, choices)
        return None

    @staticmethod
    def _put(place: Loss, weight: float, value: jax.Array) -> None:
        place.set_value(jnp.asarray(weight * value, jnp.float32))
