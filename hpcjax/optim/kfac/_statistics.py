"""The Kronecker factors of one layer from its inputs and output gradients."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hpcjax import layers
from hpcjax.core.varying import vary_like
from hpcjax.layers import Padding
from hpcjax.optim.full_precision import statistics_dtype

Factors = dict[str, jax.Array]
# Patches are formed for a few examples at a time, at most so many numbers, which are
# 16 MB in float32: all patches of a batch are larger than its inputs by the size of the
# kernel, and forming them in pieces that fit a cache is twice as fast.
_ELEMENTS = 2**22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistic:
    """Computes `{"a": A, "g": G}` of a dense or convolutional layer from x and g.

    Rows run over examples and positions. With ā = [x; 1] if the layer has a bias, and
    ā = x otherwise, a dense layer has A = mean(ā āᵀ) and G = mean(g gᵀ). The ā of a
    convolution are its patches, flattened in the order of the kernel. With T output
    positions there are two conventions:

    - KFC: A = T · mean(ā āᵀ), which is the sum over positions, and G = mean(g gᵀ).
    - `reference=True`, that of KAISA's library: ā and g are divided by T first, so that
      A = mean(ā āᵀ) / T² and G = mean(g gᵀ) / T².

    A⊗G of the second is T⁻⁵ times that of the first. The g of a mean loss are small by
    the number of its terms; the transform corrects G for it. Statistics compare by
    value, so equal ones do not make `jit` compile again.

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
        outputs = self._sum_outer(g.reshape(-1, g.shape[-1]), bias=False)
        rows = math.prod(g.shape[:-1])
        if not self.conv:
            inputs = self._sum_outer(x.reshape(-1, x.shape[-1]), bias=self.use_bias)
            return {"a": inputs / rows, "g": outputs / rows}
        # T = positions, rows = examples · T.
        inputs, positions = self._sum_patches(x), math.prod(g.shape[1:-1])
        if self.reference:
            scale = rows * positions**2
            return {"a": inputs / scale, "g": outputs / scale}
        return {"a": inputs * (positions / rows), "g": outputs / rows}

    def _sum_outer(
        self, rows: Float[Array, "rows dim"], *, bias: bool
    ) -> Float[Array, "n n"]:
        """Returns the sum of r rᵀ, or of [r; 1] [r; 1]ᵀ."""
        dtype = statistics_dtype(rows.dtype)
        total = jnp.einsum(
            "ri,rj->ij",
            rows,
            rows,
            precision=self.precision,
            preferred_element_type=dtype,
        )
        # A product of a matrix with its transpose is not symmetric to the last bit.
        total = (total + total.T) / 2
        if not bias:
            return total
        # The row and column of the ones are sums: no need to append ones to the rows.
        column = jnp.sum(rows, axis=0, dtype=dtype)[:, None]
        count = jnp.full((1, 1), rows.shape[0], dtype)
        return jnp.block([[total, column], [column.T, count]])

    def _sum_patches(self, x: jax.Array) -> Float[Array, "n n"]:
        """Returns the sum over all patches, a few examples' patches at a time."""
        shape = jax.eval_shape(self._patches, x[:1]).shape
        chunk = _largest_divisor(x.shape[0], at_most=_ELEMENTS // math.prod(shape))
        chunks = x.reshape(-1, chunk, *x.shape[1:])

        def add(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return total + self._sum_outer(self._patches(x), bias=self.use_bias), None

        size = shape[1] + self.use_bias
        zeros = jnp.zeros((size, size), statistics_dtype(x.dtype))
        return lax.scan(add, vary_like(zeros, x), chunks)[0]

    def _patches(self, x: jax.Array) -> Float[Array, "rows dim"]:
        """Returns a patch for each example and position, `[rows, patch size]`.

        Within a patch the order is that of the kernel's axes, the channel the fastest.
        """
        patches = layers.patches(
            x,
            self.kernel_size,
            strides=self.strides,
            padding=self.padding,
            dilation=self.dilation,
        )
        return patches.reshape(-1, patches.shape[-1])


def _largest_divisor(number: int, *, at_most: int) -> int:
    """Returns the largest divisor of `number` that is at most so large, or 1."""
    return next(
        d for d in range(max(1, min(number, at_most)), 0, -1) if number % d == 0
    )
