"""Perplexity and multiple-choice accuracy of language models."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from hpcjax import metrics, models
from hpcjax.core.errors import ConfigError
from hpcjax.inference.generation import LanguageModel

# tokens [batch, time] -> −log p of every token but the first, [batch, time − 1].
Losses = Callable[[Any], Any]


class Perplexity(NamedTuple):
    """Perplexity of a text.

    Attributes:
      perplexity: exp of `loss`.
      loss: mean over windows of the mean −log p of their tokens, in nats.
      windows: number of windows.
      left: number of tokens behind the last whole window, which are not scored.
    """

    perplexity: float
    loss: float
    windows: int
    left: int


@jax.jit
def token_losses(
    language_model: LanguageModel, tokens: Int[Array, "batch time"]
) -> Float[Array, "batch ahead"]:
    """Returns −log p(token | tokens before it) of every token but the first.

    Args:
      language_model: the model with its parameters.
      tokens: `[batch, time]`.

    Returns:
      `[batch, time − 1]`, float32, in nats.
    """
    model, params = language_model.model, language_model.params
    logits, _ = model.apply(params, {}, tokens[:, :-1], train=False)
    # Models with `loss_chunk` return logits that are computed chunk by chunk, since all
    # at once, `[batch, time, vocabulary]`, may not fit in memory.
    if isinstance(logits, models.ChunkedLogits):
        return logits.each(metrics.token_cross_entropy, tokens[:, 1:])
    return metrics.token_cross_entropy(logits, tokens[:, 1:])


def perplexity(
    losses: Losses,
    tokens: Int[np.ndarray, " time"] | Int[Array, " time"],
    *,
    window: int = 2048,
    batch: int = 8,
) -> Perplexity:
    """Returns the perplexity of a text, cut into windows that do not overlap.

    Tokens are predicted from earlier ones of their window only; the first token of a
    window has none, and is not scored.

    Args:
      losses: maps tokens `[batch, time]` to −log p `[batch, time − 1]`, such as
        `token_losses` with a model bound.
      tokens: the text.
      window: tokens of a window, at least 2.
      batch: windows per call of `losses`.

    Raises:
      ConfigError: a window of less than two tokens, or a text shorter than a window.

    References:
      The evaluation of Frantar et al., GPTQ, ICLR 2023, §4.
    """
    if window < 2 or len(tokens) < window:
        raise ConfigError(
            "a text needs at least one window of at least two tokens: got "
            f"{len(tokens)} tokens, window={window}"
        )
    count = len(tokens) // window
    rows = np.asarray(tokens[: count * window], np.int32).reshape(count, window)
    total = 0.0
    for start in range(0, count, batch):
        window_losses = np.asarray(losses(rows[start : start + batch]), np.float64)
        total += float(np.sum(np.mean(window_losses, axis=1)))
    loss = total / count
    return Perplexity(math.exp(loss), loss, count, len(tokens) - count * window)


def check_text(time: int, window: int) -> None:
    """Raises ConfigError for texts in which no token behind the window is predicted."""
    if time < window + 2:
        raise ConfigError(
            f"a text must have at least {window + 2} tokens, two more than the window: "
            f"got {time}"
        )


@jax.jit
def decoded_losses(
    language_model: LanguageModel,
    x: models.Decoding,
    following: Int[Array, "batch places"],
) -> Float[Array, "batch places"]:
    """Returns −log p of the tokens that follow those of a `Decoding`.

    Args:
      language_model: the model with its parameters.
      x: tokens to read, and the positions at which to compute logits.
      following: the true token behind each of these positions.

    Returns:
      `[batch, places]`, float32, in nats.
    """
    logits, _ = language_model.decode(x)
    return metrics.token_cross_entropy(logits, following)


class ChoiceAccuracy(NamedTuple):
    """Accuracy on multiple-choice questions.

    Attributes:
      accuracy: share of questions whose true ending had the largest Σ log p; NaN if
        one is.
      normalized: likewise, with Σ log p divided by the ending's number of tokens.
      count: number of questions.
    """

    accuracy: float
    normalized: float
    count: int


def answer_choices(
    losses: Losses,
    questions: Iterable[tuple[list[int], list[list[int]], int]],
    *,
    time: int,
) -> ChoiceAccuracy:
    """Answers each question with the ending that the model finds most likely.

    Args:
      losses: as for `perplexity`.
      questions: tokens of the context, tokens of each ending, and the index of the true
        ending.
      time: length to which context and ending are padded or cut; of too long ones, the
        beginning of the context is cut.

    Raises:
      ConfigError: no question, an empty context or ending, an ending of `time` or more
        tokens, or an invalid index.
    """
    count, correct = 0, np.zeros(2)
    for context, endings, true in questions:
        lengths = [len(ending) for ending in endings]
        valid = context and lengths and min(lengths) > 0 and max(lengths) < time
        if not (valid and 0 <= true < len(endings)):
            raise ConfigError(
                f"a question needs a context, endings of 1 … {time - 1} tokens, and "
                f"which is true: got {len(context)} tokens, {lengths} and {true}"
            )
        rows = np.zeros((len(endings), time), np.int32)
        scored = np.zeros((len(endings), time - 1), bool)
        for row, in_ending, ending in zip(rows, scored, endings, strict=True):
            text = [*context, *ending][-time:]
            row[: len(text)] = text
            # Entry j of the losses is that of token j + 1. Padding on the right changes
            # none of them, as attention is causal.
            in_ending[len(text) - 1 - len(ending) : len(text) - 1] = True
        sums = -np.sum(np.asarray(losses(rows), np.float64), axis=1, where=scored)
        chosen = np.array([np.argmax(sums), np.argmax(sums / lengths)])
        # The largest of sums with NaN is the NaN, and maybe the true ending's.
        correct += math.nan if np.isnan(sums).any() else chosen == true
        count += 1
    if not count:
        raise ConfigError("there are no questions")
    accuracy, normalized = (correct / count).tolist()
    return ChoiceAccuracy(accuracy, normalized, count)
