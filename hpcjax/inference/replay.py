"""Speculative decoding on a text that the target has already written."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from hpcjax.core import checks
from hpcjax.inference.generation import LanguageModel


def replay(
    draft: LanguageModel,
    tokens: Int[Array, "batch time"] | Int[np.ndarray, "batch time"],
    *,
    start: int,
    ahead: int,
) -> Shaped[np.ndarray, " ahead_and_1"]:
    """Counts what speculative decoding would accept on a target's likeliest texts.

    Greedily decoded, a draft's tokens are accepted as long as they are the target's, so
    that one pass of the draft over the text says which ones would have been. No target
    is needed: the texts may be a recording.

    Args:
      draft: the model whose drafts are judged.
      tokens: prompts with the target's own greedy continuations, all of one length.
      start: where the continuations begin, at least 1.
      ahead: γ, at least 1.

    Returns:
      How many iterations accepted 0, 1, … γ drafts, as `speculate` counts them; what
      the end of a text cuts is counted as far as the text goes.

    Raises:
      ConfigError: no continuation, or no drafts.
    """
    checks.require_count(1, start=start, ahead=ahead)
    rule = "the texts must be longer than their prompts"
    checks.require(start < tokens.shape[1], rule, start=start, time=tokens.shape[1])
    right = np.asarray(_right(draft, jnp.asarray(tokens)))[:, start - 1 :]
    counts = np.zeros(ahead + 1, np.int64)
    for row in right:
        place = 0
        while place < len(row):
            missed = np.flatnonzero(~row[place : place + ahead])
            accepted = int(missed[0]) if len(missed) else min(ahead, len(row) - place)
            counts[accepted] += 1
            place += accepted + 1
    return counts


@jax.jit
def _right(draft: LanguageModel, tokens: jax.Array) -> jax.Array:
    """Returns which tokens but the first are the draft's likeliest ones."""
    logits, _ = draft.model.apply(draft.params, {}, tokens[:, :-1], train=False)
    return jnp.argmax(logits, axis=-1) == tokens[:, 1:]
