"""The Kronecker factors of one layer, from its inputs and output gradients."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hpcjax.layers import Padding
from hpcjax.optim.full_precision import statistics_dtype

Factors = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistic:
    """The backward statistic `(x, g) -> {"a": A, "g": G}` of a dense or conv layer.

    With ā = [x; 1] if the layer has a bias, and rows that run over examples and
    positions, a dense layer has A = mean ā āᵀ and G = mean g gᵀ. A convolution's ā are
    its patches, in the order of the flattened kernel, and with T positions either

    - `"kfc"`: A = T · mean ā āᵀ (the sum over positions), G = mean g gᵀ, or
    - `"reference"`: both of a and g divided by T first, A = mean ā āᵀ / T².

    So A⊗G differs by T⁻⁵ between them. g is taken as it arrives; the transform scales
    G. Two equal statistics are one to `jit`.

    References:
      Martens and Grosse 2015, §3; Grosse and Martens 2016, eq. 31 and 32.
    """

    use_bias: bool
    conv: bool = False
    kernel_size: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    padding: Padding = "VALID"
    dilation: tuple[int, int] = (1, 1)
    reference: bool = False
    precision: str = "highest"

    def __call__(self, x: jax.Array, g: jax.Array) -> Factors:
        """Returns A `[a, a]` and G `[g, g]`, in float32 or better."""
        positions = math.prod(g.shape[1:-1]) if self.conv else 1
        patches = self._patches(x) if self.conv else x.reshape(-1, x.shape[-1])
        inputs = self._moment(patches, bias=self.use_bias)
        outputs = self._moment(g.reshape(-1, g.shape[-1]), bias=False)
        if self.conv and self.reference:
            return {"a": inputs / positions**2, "g": outputs / positions**2}
        return {"a": inputs * positions, "g": outputs}

    def _moment(
        self, rows: Float[Array, "rows dim"], *, bias: bool
    ) -> Float[Array, "n n"]:
        """Returns the mean of r rᵀ, or of [r; 1] [r; 1]ᵀ."""
        dtype, count = statistics_dtype(rows.dtype), rows.shape[0]
        total = jnp.einsum(
            "ri,rj->ij",
            rows,
            rows,
            precision=self.precision,
            preferred_element_type=dtype,
        )
        moment = (total + total.T) / (2 * count)
        if not bias:
            return moment
        mean = jnp.mean(rows, axis=0, dtype=dtype)[:, None]
        one = jnp.ones((1, 1), dtype)
        return jnp.block([[moment, mean], [mean.T, one]])

    def _patches(self, x: jax.Array) -> Float[Array, "rows dim"]:
        """Returns a row for each position: kernel height, kernel width, channel."""
        height, width = self.kernel_size
        patches = lax.conv_general_dilated_patches(
            x,
            (height, width),
            self.strides,
            self.padding,
            rhs_dilation=self.dilation,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        # The patches list all taps of the first channel, then of the second.
        split = patches.reshape(-1, x.shape[-1], height * width)
        return split.swapaxes(1, 2).reshape(split.shape[0], -1)
