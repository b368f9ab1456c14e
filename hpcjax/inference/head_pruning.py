"""Leaving heads and tokens out: what clusters of heads are compared with.

Masks say what is kept. What they are used for, such as multiplying heads' outputs by
them, is the caller's.

References:
  Wang, Zhang and Han, SpAtten: Efficient Sparse Attention Architecture with Cascade
  Token and Head Pruning, HPCA 2021. Liu et al., Deja Vu: Contextual Sparsity for
  Efficient LLMs at Inference Time, ICML 2023.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from hpcjax.core.errors import ConfigError
from hpcjax.core.keys import derive


def top_heads(
    importance: Float[Array, "*batch heads"], keep: int | Int[Array, "..."]
) -> Bool[Array, "*batch heads"]:
    """Returns a mask of the `keep` most important; of equal ones the first count.

    Args:
      importance: of heads, or of anything else along the last axis.
      keep: how many; an array is one for each row of `importance`.

    Raises:
      ConfigError: keep is an int not in [0, heads].

    Examples:
      >>> top_heads(jnp.array([1.0, 3.0, 2.0, 3.0]), 2).tolist()
      [False, True, False, True]
    """
    heads = importance.shape[-1]
    if isinstance(keep, int) and not 0 <= keep <= heads:
        raise ConfigError(f"keep must be in [0, {heads}]: got keep={keep}")
    order = jnp.argsort(importance, axis=-1, stable=True, descending=True)
    return jnp.argsort(order, axis=-1) < jnp.asarray(keep)[..., None]


def kept_counts(total: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """Returns ⌈ratio · total⌉ for each layer, the schedule of a cascade.

    Args:
      total: heads or tokens.
      ratios: shares that are kept, in (0, 1] and never more than in the layer before.

    Raises:
      ConfigError: other ratios.

    Examples:
      >>> kept_counts(9, [1.0, 0.7, 0.5])
      (9, 7, 5)
    """
    before = 1.0
    for layer, ratio in enumerate(ratios):
        if not 0 < ratio <= before:
            raise ConfigError(
                f"layer {layer}: a kept ratio must be in (0, {before}], as what is "
                f"pruned stays so: got {ratio}"
            )
        before = ratio
    # 0.7 · 10 is 7.000000000000001.
    return tuple(max(1, math.ceil(ratio * total - 1e-9)) for ratio in ratios)


class Cascade(NamedTuple):
    """What is left at a layer, and the importance that has come together so far.

    Attributes:
      heads: `[batch, heads]`, those kept.
      tokens: `[batch, tokens]`, those kept; never one that is padding.
      head_importance: `[batch, heads]`, Σ |output| over tokens and layers, float32.
      token_importance: `[batch, tokens]`, Σ of the attention paid to a token, over
        queries, heads and layers, float32.
    """

    heads: Bool[Array, "batch heads"]
    tokens: Bool[Array, "batch tokens"]
    head_importance: Float[Array, "batch heads"]
    token_importance: Float[Array, "batch tokens"]


def start_cascade(tokens: Bool[Array, "batch tokens"], heads: int) -> Cascade:
    """Keeps all heads, and the tokens that are there.

    Examples:
      >>> cascade = start_cascade(jnp.array([[True, True, False]]), 2)
      >>> cascade.heads.tolist(), cascade.token_importance.shape
      ([[True, True]], (1, 3))
    """
    batch = len(tokens)
    return Cascade(
        heads=jnp.ones((batch, heads), bool),
        tokens=tokens,
        head_importance=jnp.zeros((batch, heads), jnp.float32),
        token_importance=jnp.zeros(tokens.shape, jnp.float32),
    )


def observe_layer(
    cascade: Cascade,
    outputs: Float[Array, "batch q_time heads head_dim"],
    maps: Float[Array, "batch heads q_time tokens"],
) -> Cascade:
    """Adds what a layer shows to the importance of heads and tokens.

    Heads that are pruned show nothing. In decoding importance goes on: it is called for
    each new token, too.

    Args:
      cascade: what was left in the layer.
      outputs: of each head, before they are mixed; 0 for queries that are padding.
      maps: softmaxed attention; 0 for queries that are padding.
    """
    shown = jnp.sum(jnp.abs(outputs.astype(jnp.float32)), axis=(1, 3))
    paid = jnp.sum(maps.astype(jnp.float32), axis=2)
    paid = jnp.sum(jnp.where(cascade.heads[..., None], paid, 0), axis=1)
    return cascade._replace(
        head_importance=cascade.head_importance + jnp.where(cascade.heads, shown, 0),
        token_importance=cascade.token_importance + jnp.where(cascade.tokens, paid, 0),
    )


def prune(
    cascade: Cascade,
    keep_heads: int | Int[Array, " batch"],
    keep_tokens: int | Int[Array, " batch"],
) -> Cascade:
    """Keeps the most important of the heads and tokens that are left.

    What is pruned stays pruned; where fewer are left than shall be kept, all stay.

    Args:
      cascade: of the layer before.
      keep_heads: how many heads, such as by `kept_counts`.
      keep_tokens: how many tokens.

    Examples:
      >>> cascade = start_cascade(jnp.ones((1, 3), bool), 2)
      >>> outputs = jnp.array([[[[1.0], [5.0]]] * 3])
      >>> maps = jnp.array([[[[0.7, 0.2, 0.1]] * 3] * 2])
      >>> left = prune(observe_layer(cascade, outputs, maps), 1, 2)
      >>> left.heads.tolist(), left.tokens.tolist()
      ([[False, True]], [[True, True, False]])
    """
    return cascade._replace(
        heads=_keep(cascade.heads, cascade.head_importance, keep_heads),
        tokens=_keep(cascade.tokens, cascade.token_importance, keep_tokens),
    )


def _keep(
    left: Bool[Array, "batch n"],
    importance: Float[Array, "batch n"],
    keep: int | Int[Array, " batch"],
) -> Bool[Array, "batch n"]:
    return left & top_heads(jnp.where(left, importance, -jnp.inf), keep)


def output_labels(
    outputs: Float[Array, "*batch heads head_dim"], keep: int
) -> Bool[Array, "*batch heads"]:
    """Returns the `keep` heads of the largest norm of output: what an oracle keeps.

    Args:
      outputs: of each head, before they are mixed.
      keep: how many.

    Examples:
      >>> output_labels(jnp.array([[3.0, 4.0], [6.0, 0.0]]), 1).tolist()
      [False, True]
    """
    squares = jnp.sum(jnp.square(outputs.astype(jnp.float32)), axis=-1)
    return top_heads(squares, keep)


def init_predictor(
    key: jax.Array, width: int, hidden: int, heads: int
) -> dict[str, jax.Array]:
    """Draws a predictor of two layers, `width` → `hidden` → `heads`.

    Args:
      key: of the weights, normal with variance 1 / inputs; biases are 0.
      width: of the hidden state that it reads.
      hidden: its own width.
      heads: H.
    """
    normal = jax.nn.initializers.lecun_normal()
    return {
        "in": normal(derive(key, "in"), (width, hidden), jnp.float32),
        "in_bias": jnp.zeros(hidden),
        "out": normal(derive(key, "out"), (hidden, heads), jnp.float32),
        "out_bias": jnp.zeros(heads),
    }


def predict_heads(
    params: dict[str, jax.Array], state: Float[Array, "*batch width"]
) -> Float[Array, "*batch heads"]:
    """Returns a logit for each head that it matters: relu(x W₁ + b₁) W₂ + b₂, float32.

    Args:
      params: those of `init_predictor`.
      state: a token's hidden state in front of an earlier layer.

    Examples:
      >>> params = init_predictor(jax.random.key(0), 8, 4, 3)
      >>> top_heads(predict_heads(params, jnp.ones((2, 8))), 2).sum(axis=1).tolist()
      [2, 2]
    """
    x = state.astype(jnp.float32)
    x = jax.nn.relu(x @ params["in"] + params["in_bias"])
    return x @ params["out"] + params["out_bias"]


class Fitted(NamedTuple):
    """A predictor, and the loss at each step before it was taken."""

    params: dict[str, jax.Array]
    losses: Float[Array, " steps"]


def fit_predictor(
    params: dict[str, jax.Array],
    states: Float[Array, "tokens width"],
    labels: Bool[Array, "tokens heads"],
    *,
    key: jax.Array,
    steps: int = 500,
    batch: int = 256,
    lr: float = 1e-3,
) -> Fitted:
    """Fits a predictor by Adam to the mean binary cross-entropy of batches.

    Args:
      params: where it begins.
      states: the hidden state of each token.
      labels: the heads that matter for it, such as by `output_labels`.
      key: draws the batches, with replacement.
      steps: how many.
      batch: tokens in each.
      lr: learning rate.

    Raises:
      ConfigError: steps or batch is not positive.

    Examples:
      >>> states = jnp.eye(4)
      >>> params = init_predictor(jax.random.key(0), 4, 16, 2)
      >>> labels = jnp.array([[True, False]] * 2 + [[False, True]] * 2)
      >>> fitted = fit_predictor(params, states, labels, key=jax.random.key(1), lr=0.1)
      >>> bool(((predict_heads(fitted.params, states) > 0) == labels).all())
      True
    """
    if steps < 1 or batch < 1:
        raise ConfigError(
            f"steps and batch must be positive: got steps={steps}, batch={batch}"
        )
    tx = optax.adam(lr)

    def loss(params: dict[str, jax.Array], rows: jax.Array) -> jax.Array:
        logits = predict_heads(params, states[rows])
        wanted = labels[rows].astype(jnp.float32)
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, wanted))

    def step(state: tuple, number: jax.Array) -> tuple:
        params, moments = state
        own = derive(key, "batch", number)
        rows = jax.random.randint(own, (batch,), 0, len(states))
        value, grads = jax.value_and_grad(loss)(params, rows)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    (params, _), losses = jax.lax.scan(
        step, (params, tx.init(params)), jnp.arange(steps)
    )
    return Fitted(params, losses)
