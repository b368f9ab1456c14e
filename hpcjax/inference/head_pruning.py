"""Leaving heads and tokens out: what clusters of heads are compared with.

Masks say what is kept; `pruned` has the attention that goes by them. They are causal:
what is left out for a query depends on tokens up to its own.

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


class Importance(NamedTuple):
    """How much heads put out and how much attention tokens were paid.

    Attributes:
      heads: Σ |output| over layers, and over queries where it says so.
      tokens: Σ of the attention paid to each, over heads and layers.
    """

    heads: Float[Array, "*rows heads"]
    tokens: Float[Array, "*rows tokens"]


class Cascade(NamedTuple):
    """What is left for each query at a layer, and what it has shown so far.

    Attributes:
      heads: those kept.
      tokens: those kept; never one behind the query.
      shown: importance by this query alone, over the layers so far, float32.
    """

    heads: Bool[Array, "batch time heads"]
    tokens: Bool[Array, "batch time tokens"]
    shown: Importance


def start_cascade(
    positions: Int[Array, "batch time"], heads: int, tokens: int
) -> Cascade:
    """Keeps all heads, and the tokens up to each query's own.

    Args:
      positions: of the queries.
      heads: how many there are.
      tokens: how many there is room for.

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
    """Adds what a layer shows to the importance of heads and tokens.

    Heads that are pruned show nothing.

    Args:
      cascade: what was left in the layer.
      outputs: of each head, before they are mixed.
      maps: softmaxed attention to the tokens that are left.
    """
    put_out = jnp.sum(jnp.abs(outputs.astype(jnp.float32)), axis=-1)
    left = cascade.heads.astype(jnp.float32)
    paid = jnp.einsum("bhts,bth->bts", maps.astype(jnp.float32), left)
    shown = Importance(
        heads=cascade.shown.heads + left * put_out,
        tokens=cascade.shown.tokens + jnp.where(cascade.tokens, paid, 0),
    )
    return cascade._replace(shown=shown)


def gather_importance(earlier: Importance, shown: Importance) -> Importance:
    """Returns the importance that each query knows of: its own and that before it.

    So no query knows what a later one shows.

    Args:
      earlier: by all queries before these, `[batch, …]`.
      shown: by each of these, `[batch, time, …]`.

    Examples:
      >>> earlier = Importance(heads=jnp.array([[1.0, 0.0]]), tokens=jnp.zeros((1, 1)))
      >>> shown = Importance(heads=jnp.ones((1, 2, 2)), tokens=jnp.zeros((1, 2, 1)))
      >>> gather_importance(earlier, shown).heads.tolist()
      [[[2.0, 1.0], [3.0, 2.0]]]
    """
    return jax.tree.map(
        lambda before, own: before[:, None] + jnp.cumsum(own, axis=1), earlier, shown
    )


def prune(
    cascade: Cascade,
    known: Importance,
    positions: Int[Array, "batch time"],
    *,
    keep_heads: int | Int[Array, "batch time"],
    keep_tokens: int | Int[Array, "batch time"],
) -> Cascade:
    """Keeps the most important of the heads and tokens that are left for a query.

    What is pruned stays pruned in deeper layers; where fewer are left than shall be
    kept, all stay. A query's own token is among those that stay.

    Args:
      cascade: of the layer before.
      known: importance of each head and token, see `gather_importance`.
      positions: of the queries.
      keep_heads: how many heads, such as by `kept_counts`.
      keep_tokens: how many tokens, at least 1.

    Examples:
      >>> positions = jnp.array([[2]])
      >>> cascade = start_cascade(positions, heads=2, tokens=3)
      >>> known = Importance(jnp.array([[[1.0, 5.0]]]), jnp.array([[[0.2, 0.7, 0.1]]]))
      >>> left = prune(cascade, known, positions, keep_heads=1, keep_tokens=2)
      >>> left.heads.tolist(), left.tokens.tolist()
      ([[[False, True]]], [[[False, True, True]]])
    """
    own = jnp.arange(known.tokens.shape[-1]) == positions[..., None]
    tokens = jnp.where(own, jnp.inf, known.tokens)
    return cascade._replace(
        heads=_keep(cascade.heads, known.heads, keep_heads),
        tokens=_keep(cascade.tokens, tokens, keep_tokens),
    )


def _keep(
    left: Bool[Array, "batch time n"],
    importance: Float[Array, "batch time n"],
    keep: int | Int[Array, "batch time"],
) -> Bool[Array, "batch time n"]:
    return left & top_heads(jnp.where(left, importance, -jnp.inf), keep)


def output_labels(
    outputs: Float[Array, "*batch heads head_dim"], keep: int | Int[Array, "..."]
) -> Bool[Array, "*batch heads"]:
    """Returns the `keep` heads of the largest norm of output: what an oracle keeps.

    Args:
      outputs: of each head, before they are mixed.
      keep: how many, see `top_heads`.

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
