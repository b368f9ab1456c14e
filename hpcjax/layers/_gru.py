"""The gated recurrent unit."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax.layers._dense import dense


def gru_cell(
    x: Float[Array, "*batch inputs"],
    h: Float[Array, "*batch width"],
    params: Mapping[str, Array],
    *,
    compute: str = "float32",
) -> Float[Array, "*batch width"]:
    """Returns the next state, (1 − z) ⊙ n + z ⊙ h, in the dtype of h.

    r = σ(W_r x + b_r + U_r h + c_r), z likewise, and n = tanh(W_n x + b_n + r ⊙ (U_n h
    + c_n)). The three are side by side in this order, as PyTorch's GRUCell has them:
    its `weight_ih` and `weight_hh` are `of_input` and `of_state`, transposed.

    Args:
      x: inputs.
      h: the state.
      params: `of_input` [inputs, 3 · width], `of_state` [width, 3 · width], and
        `input_bias` and `state_bias` [3 · width].
      compute: dtype of the products' operands.

    References:
      Cho et al., EMNLP 2014, in the form of cuDNN.

    Examples:
      >>> zeros = {"of_input": (2, 9), "of_state": (3, 9)}
      >>> zeros |= {"input_bias": (9,), "state_bias": (9,)}
      >>> params = {name: jnp.zeros(shape) for name, shape in zeros.items()}
      >>> gru_cell(jnp.ones(2), jnp.ones(3), params).tolist()
      [0.5, 0.5, 0.5]
    """
    how = {"compute": compute, "output": "float32"}
    given = dense(x, params["of_input"], params["input_bias"], **how)
    kept = dense(h, params["of_state"], params["state_bias"], **how)
    (r, z, n), (s, y, m) = (jnp.split(each, 3, axis=-1) for each in (given, kept))
    update = jax.nn.sigmoid(z + y)
    new = jnp.tanh(n + jax.nn.sigmoid(r + s) * m)
    return ((1 - update) * new + update * h).astype(h.dtype)
