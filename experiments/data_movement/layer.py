"""An encoder layer in plain JAX."""

from collections.abc import Callable, Mapping
from typing import Any

EPS = 1e-5
# Axes as in `ir.encoder_layer`; a mask is 0 where a value is dropped, else 1 / (1 - p).
PARAMETERS = {
    "w_qkv": "qphi",
    "b_qkv": "qph",
    "w_out": "phi",
    "b_out": "i",
    "scale_1": "i",
    "shift_1": "i",
    "w_up": "ui",
    "b_up": "u",
    "w_down": "iu",
    "b_down": "i",
    "scale_2": "i",
    "shift_2": "i",
}
MASKS = {"attention": "hbjk", "out": "bij", "up": "bju", "down": "bji"}
INPUT = "ibj"


def shapes(axes: Mapping[str, str], sizes: Mapping[str, int], dtype: str) -> Any:
    """Returns shapes and dtypes of arrays with these axes."""
    import jax

    return {
        name: jax.ShapeDtypeStruct(tuple(sizes[axis] for axis in own), dtype)
        for name, own in axes.items()
    }


def plain_layer(
    params: Mapping[str, Any],
    x: Any,
    masks: Mapping[str, Any],
    attend: Callable[..., Any] | None = None,
) -> Any:
    """Returns the output `[i, b, j]` of a post-norm encoder layer.

    Args:
      params: as `PARAMETERS`.
      x: `[i, b, j]`.
      masks: as `MASKS`.
      attend: of queries, keys and values `[b, j, h, p]`, without dropout; None for
        softmax and dropout here.
    """
    import jax
    import jax.numpy as jnp

    stacked = jnp.einsum("qphi,ibj->qphbj", params["w_qkv"], x)
    query, key, value = stacked + params["b_qkv"][..., None, None]
    if attend is not None:
        turned = (jnp.transpose(each, (2, 3, 1, 0)) for each in (query, key, value))
        mixed = jnp.transpose(attend(*turned), (3, 2, 0, 1))
    else:
        scores = jnp.einsum("phbk,phbj->hbjk", key, query)
        weights = jax.nn.softmax(scores * query.shape[0] ** -0.5, axis=-1)
        dropped = weights * masks["attention"]
        mixed = jnp.einsum("phbk,hbjk->phbj", value, dropped)
    out = jnp.einsum("phi,phbj->bij", params["w_out"], mixed)
    out = (out + params["b_out"][:, None]) * masks["out"]
    total = jnp.moveaxis(out, 1, 2) + jnp.moveaxis(x, 0, -1)
    normed = normalise(total, params["scale_1"], params["shift_1"])
    up = jnp.einsum("bji,ui->bju", normed, params["w_up"]) + params["b_up"]
    hidden = jax.nn.relu(up) * masks["up"]
    down = jnp.einsum("bju,iu->bji", hidden, params["w_down"]) + params["b_down"]
    total = down * masks["down"] + normed
    y = normalise(total, params["scale_2"], params["shift_2"])
    return jnp.moveaxis(y, -1, 0)


def normalise(x: Any, scale: Any, shift: Any) -> Any:
    """Returns the layer norm of the last axis."""
    import jax

    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + EPS) * scale + shift


def fused_layer(
    params: Mapping[str, Any], x: Any, seeds: Mapping[str, Any], **options: Any
) -> Any:
    """Returns `plain_layer` with fused operations between contractions.

    Args:
      params: as `PARAMETERS`.
      x: `[i, b, j]`.
      seeds: of the masks, as `MASKS`; that of "out" is drawn for `bji`.
      **options: of the operations; of `rate` a mapping as `seeds`.
    """
    import jax.numpy as jnp

    from hpcjax import kernels

    rates = options.pop("rate")

    def dropout(name: str) -> dict[str, Any]:
        return {"seed": seeds[name], "rate": rates[name], **options}

    def norm(x: Any, bias: str, residual: Any, number: int, name: str) -> Any:
        end = params[f"scale_{number}"], params[f"shift_{number}"]
        return kernels.dropout_residual_norm(
            x, params[bias], residual, *end, eps=EPS, **dropout(name)
        )

    stacked = jnp.einsum("qphi,ibj->qphbj", params["w_qkv"], x)
    biases = params["b_qkv"][..., None, None]
    query, key, value = kernels.attention_biases(stacked, biases)
    scores = jnp.einsum("phbk,phbj->hbjk", key, query)
    scale = query.shape[0] ** -0.5
    dropped = kernels.softmax_dropout(scores, scale=scale, **dropout("attention"))
    mixed = jnp.einsum("phbk,hbjk->phbj", value, dropped)
    out = jnp.einsum("phi,phbj->bji", params["w_out"], mixed)
    normed = norm(out, "b_out", jnp.moveaxis(x, 0, -1), 1, "out")
    up = jnp.einsum("bji,ui->bju", normed, params["w_up"])
    hidden = kernels.bias_activation_dropout(up, params["b_up"], **dropout("up"))
    down = jnp.einsum("bju,iu->bji", hidden, params["w_down"])
    return jnp.moveaxis(norm(down, "b_down", normed, 2, "down"), -1, 0)


def with_gradients(params: Any, x: Any, masks: Any, cotangent: Any) -> Any:
    """Returns the output and the gradients of parameters and input."""
    import jax

    y, pull = jax.vjp(lambda params, x: plain_layer(params, x, masks), params, x)
    return y, pull(cotangent)
