"""Logits of pixels of which each device has a block."""

from jaxtyping import Array, Float

from hpcjax.core.structs import pytree, static


@pytree
class CutPixels:
    """This device's block of the logits of pixels, inside `shard_map`.

    A score that is no mean over blocks, such as Dice, sums over `axes`.

    Attributes:
      values: `[batch, ..., classes]`.
      axes: mesh axes that space is cut over.
    """

    values: Float[Array, "batch *space classes"]
    axes: tuple[str, ...] = static()
