"""Acceptance of draft tokens on texts that a target model has already written."""

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
    """Counts what greedy speculative decoding would accept on recorded texts.

    In greedy decoding, draft tokens are accepted while they equal the target's tokens.
    These are known, so that one pass of the draft over a text says at which positions
    it agrees. The target itself is not needed.

    Args:
      draft: the draft model.
      tokens: prompts with the target's greedy continuations, all of one length.
      start: position at which the continuations begin, at least 1.
      ahead: γ, the lookahead, at least 1.

    Returns:
      How many iterations accepted 0, 1, … γ draft tokens, as `speculate` counts them.
      In the last iteration of a text, tokens behind its end count as not accepted.

    Raises:
      ConfigError: texts without continuation, or `start` or `ahead` below 1.
    """
    checks.require_count(1, start=start, ahead=ahead)
    rule = "the texts must be longer than their prompts"
    checks.require(start < tokens.shape[1], rule, start=start, time=tokens.shape[1])
    # Entry j of a match is about token j + 1: the first token is not predicted.
    agrees = np.asarray(_match_draft(draft, jnp.asarray(tokens)))[:, start - 1 :]
    counts = np.zeros(ahead + 1, np.int64)
    for row in agrees:
        place = 0
        while place < len(row):
            misses = np.flatnonzero(~row[place : place + ahead])
            accepted = int(misses[0]) if len(misses) else min(ahead, len(row) - place)
            counts[accepted] += 1
            # The accepted tokens and the one that the target adds itself.
            place += accepted + 1
    return counts


@jax.jit
def _match_draft(draft: LanguageModel, tokens: jax.Array) -> jax.Array:
    """Returns whether each token but the first is the draft's most likely one."""
    logits, _ = draft.model.apply(draft.params, {}, tokens[:, :-1], train=False)
    return jnp.argmax(logits, axis=-1) == tokens[:, 1:]
