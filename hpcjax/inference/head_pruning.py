"""Choice of the heads and tokens that SpAtten and Deja Vu prune, as masks.

These are the baselines of clustered heads; `pruned_heads` has their attention. All
masks are causal: what is pruned for a query depends on the tokens up to its own only.

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
    """Returns a mask of the `keep` most important heads; of equal ones, the first.

    Args:
      importance: of heads, or of tokens, along the last axis.
      keep: number of heads to keep; an array has one number for each row.

    Raises:
      ConfigError: keep is an int outside of [0, heads].

    Examples:
      >>> top_heads(jnp.array([1.0, 3.0, 2.0, 3.0]), 2).tolist()
      [False, True, False, True]
    """
    heads = importance.shape[-1]
    if isinstance(keep, int) and not 0 <= keep <= heads:
        raise ConfigError(f"keep must be in [0, {heads}]: got keep={keep}")
    order = jnp.argsort(importance, axis=-1, stable=True, descending=True)
    # The argsort of the order is the rank of each head.
    return jnp.argsort(order, axis=-1) < jnp.asarray(keep)[..., None]


def kept_counts(total: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """Returns ⌈ratio · total⌉ for each layer, the schedule of a cascade.

    Args:
      total: number of heads or tokens.
      ratios: share that each layer keeps, in (0, 1], never more than the layer before.

    Raises:
      ConfigError: invalid ratios.

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
    # 0.7 * 10 is 7.000000000000001, whose ceiling would be 8.
    return tuple(max(1, math.ceil(ratio * total - 1e-9)) for ratio in ratios)


class Importance(NamedTuple):
    """Importance of heads and tokens, as SpAtten measures it.

    Attributes:
      heads: Σ |output| of each head over layers and, if accumulated, queries.
      tokens: Σ of the attention probabilities of each token over heads, layers and, if
        accumulated, queries.
    """

    heads: Float[Array, "*rows heads"]
    tokens: Float[Array, "*rows tokens"]


class Cascade(NamedTuple):
    """The heads and tokens that each query still has at a layer.

    Attributes:
      heads: mask of the kept heads.
      tokens: mask of the kept tokens; never one behind the query.
      shown: importance measured by this query alone in the layers so far, float32.
    """

    heads: Bool[Array, "batch time heads"]
    tokens: Bool[Array, "batch time tokens"]
    shown: Importance


def start_cascade(
    positions: Int[Array, "batch time"], heads: int, tokens: int
) -> Cascade:
    """Returns the cascade in front of the first layer: nothing is pruned.

    Args:
      positions: of the queries; each has the tokens up to its own.
      heads: number of heads.
      tokens: size of the cache.

    Examples:
      >>> cascade = start_cascade(jnp.array([[1, 2]]), heads=2, tokens=3)
      >>> cascade.tokens.tolist(), cascade.shown.heads.shape
      ([[[True, True, False], [True, True, True]]], (1, 2, 2))
    """
    queries = positions.shape
    return Cascade(
        heads=jnp.ones((*queries, heads), bool),
        tokens=jnp.arange(tokens) <= positions[..., None],
        shown=Importance(
            heads=jnp.zeros((*queries, heads), jnp.float32),
            tokens=jnp.zeros((*queries, tokens), jnp.float32),
        ),
    )


def observe_layer(
    cascade: Cascade,
    outputs: Float[Array, "batch time heads head_dim"],
    maps: Float[Array, "batch heads time tokens"],
) -> Cascade:
    """Adds a layer's outputs and attention to the importance of heads and tokens.

    Pruned heads add nothing.

    Args:
      cascade: the heads and tokens kept in the layer.
      outputs: of each head, before the output projection.
      maps: softmaxed attention to the kept tokens.
    """
    magnitude = jnp.sum(jnp.abs(outputs.astype(jnp.float32)), axis=-1)
    kept = cascade.heads.astype(jnp.float32)
    received = jnp.einsum("bhts,bth->bts", maps.astype(jnp.float32), kept)
    shown = Importance(
        heads=cascade.shown.heads + kept * magnitude,
        tokens=cascade.shown.tokens + jnp.where(cascade.tokens, received, 0),
    )
    return cascade._replace(shown=shown)


def gather_importance(earlier: Importance, shown: Importance) -> Importance:
    """Returns the importance measured by each query and all queries before it.

    The cumulative sum keeps the pruning causal: tokens that are read together get the
    same masks as one after another.

    Args:
      earlier: importance by all queries before these, `[batch, …]`.
      shown: importance by each of these alone, `[batch, time, …]`.

    Examples:
      >>> earlier = Importance(heads=jnp.array([[1.0, 0.0]]), tokens=jnp.zeros((1, 1)))
      >>> shown = Importance(heads=jnp.ones((1, 2, 2)), tokens=jnp.zeros((1, 2, 1)))
      >>> gather_importance(earlier, shown).heads.tolist()
      [[[2.0, 1.0], [3.0, 2.0]]]
    """
    return jax.tree.map(
        lambda before, own: before[:, None] + jnp.cumsum(own, axis=1), earlier, shown
    )


def prune_heads_and_tokens(
    cascade: Cascade,
    known: Importance,
    positions: Int[Array, "batch time"],
    *,
    keep_heads: int | Int[Array, "batch time"],
    keep_tokens: int | Int[Array, "batch time"],
) -> Cascade:
    """Keeps the most important ones of the heads and tokens that a query still has.

    What was pruned in an earlier layer stays pruned. If fewer are left than should be
    kept, all of these are. A query's own token is always kept.

    Args:
      cascade: of the layer before.
      known: importance of each head and token, see `gather_importance`.
      positions: of the queries.
      keep_heads: number of heads, such as by `kept_counts`.
      keep_tokens: number of tokens, at least 1.

    Examples:
      >>> positions = jnp.array([[2]])
      >>> cascade = start_cascade(positions, heads=2, tokens=3)
      >>> known = Importance(jnp.array([[[1.0, 5.0]]]), jnp.array([[[0.2, 0.7, 0.1]]]))
      >>> left = prune_heads_and_tokens(
      ...     cascade, known, positions, keep_heads=1, keep_tokens=2
      ... )
      >>> left.heads.tolist(), left.tokens.tolist()
      ([[[False, True]]], [[[False, True, True]]])
    """
    # Infinite importance keeps the query's own token.
    own = jnp.arange(known.tokens.shape[-1]) == positions[..., None]
    tokens = jnp.where(own, jnp.inf, known.tokens)
    return cascade._replace(
        heads=_keep_top(cascade.heads, known.heads, keep_heads),
        tokens=_keep_top(cascade.tokens, tokens, keep_tokens),
    )


def _keep_top(
    left: Bool[Array, "batch time n"],
    importance: Float[Array, "batch time n"],
    keep: int | Int[Array, "batch time"],
) -> Bool[Array, "batch time n"]:
    # Pruned ones rank last, but may be among the first `keep` if fewer are left.
    return left & top_heads(jnp.where(left, importance, -jnp.inf), keep)


def output_labels(
    outputs: Float[Array, "*batch heads head_dim"], keep: int | Int[Array, "..."]
) -> Bool[Array, "*batch heads"]:
    """Returns a mask of the `keep` heads whose outputs have the largest norms.

    These are the labels that predictors learn, and what an oracle keeps.

    Args:
      outputs: of each head, before the output projection.
      keep: number of heads, see `top_heads`.

    Examples:
      >>> output_labels(jnp.array([[3.0, 4.0], [6.0, 0.0]]), 1).tolist()
      [False, True]
    """
    # The order of norms is that of their squares.
    squares = jnp.sum(jnp.square(outputs.astype(jnp.float32)), axis=-1)
    return top_heads(squares, keep)


def init_predictor(
    key: jax.Array, width: int, hidden: int, heads: int
) -> dict[str, jax.Array]:
    """Draws the parameters of a two-layer perceptron, `width` → `hidden` → `heads`.

    Args:
      key: of the weights, truncated normal with variance 1 / inputs; biases are 0.
      width: of the model's hidden state, its input.
      hidden: of its hidden layer.
      heads: H, its outputs.
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
    """Returns a logit for each head that it should be kept.

    The logits are relu(x W₁ + b₁) W₂ + b₂, in float32.

    Args:
      params: as from `init_predictor`.
      state: x, the residual stream in front of an earlier layer.

    Examples:
      >>> params = init_predictor(jax.random.key(0), 8, 4, 3)
      >>> top_heads(predict_heads(params, jnp.ones((2, 8))), 2).sum(axis=1).tolist()
      [2, 2]
    """
    x = state.astype(jnp.float32)
    x = jax.nn.relu(x @ params["in"] + params["in_bias"])
    return x @ params["out"] + params["out_bias"]


class FittedPredictor(NamedTuple):
    """A fitted predictor.

    Attributes:
      params: see `init_predictor`.
      losses: the loss in front of each step.
    """

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
) -> FittedPredictor:
    """Fits a predictor with Adam to the binary cross-entropy, averaged over a batch.

    Args:
      params: initial parameters.
      states: hidden states of tokens.
      labels: heads to keep for each token, such as from `output_labels`.
      key: draws the batches, with replacement.
      steps: number of steps.
      batch: tokens of a batch.
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
    return FittedPredictor(params, losses)
