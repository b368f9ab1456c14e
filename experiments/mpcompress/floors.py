"""What a language model with codecs must beat: tables of counts, and fewer branches."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from hpcjax import compress, runs
from hpcjax.core import config
from hpcjax.data import CharTextConfig

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeftOut(compress.Codec):
    """Sends nothing: zero stands for the sum of a branch, to which its bias is added.

    The slope of a branch that is left out is zero, too.
    """

    summed: ClassVar[bool] = True

    def encode(self, y: "jax.Array", given: Any) -> Any:
        """Returns `[..., 0]`."""
        del given
        return y[..., :0]

    def decode(self, code: Any, like: Any, given: Any) -> "jax.Array":
        """Returns zeros."""
        import jax.numpy as jnp

        del code, given
        return jnp.zeros(like.shape, like.dtype)

    def code_bytes(self, shape: Sequence[int], dtype: Any) -> float:
        """Returns 0."""
        del shape, dtype
        return 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """The most frequent character behind another one, or of all.

    Attributes:
      dataset: windows of a text, counted in training and told in validation.
      known: how many characters it is told from.
      seed: names a run; nothing is drawn.
    """

    figures: ClassVar[dict[str, str]] = {"val_error": ": share of wrong characters"}

    dataset: CharTextConfig = CharTextConfig()
    known: Literal[0, 1] = 1
    seed: config.Seed = 0


@runs.measured
def run(cfg: Config, ctx: "runs.Context") -> "runs.Figures":
    """Counts pairs of characters."""
    text = cfg.dataset.load(ctx.data_root)

    def pairs(source: Any) -> tuple[np.ndarray, np.ndarray]:
        windows = source.gather(np.arange(len(source)))
        return windows["x"].ravel() * cfg.known, windows["y"].ravel()

    counts = np.zeros((text.outputs, text.outputs))
    np.add.at(counts, pairs(text.train), 1)
    before, wanted = pairs(text.validation)
    return {"val_error": np.mean(counts.argmax(1)[before] != wanted)}
