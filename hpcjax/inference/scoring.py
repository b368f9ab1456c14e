"""How well a language model foretells a text."""

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
    """How a text was foretold.

    Attributes:
      perplexity: exp of `loss`.
      loss: mean over the windows of the mean −log p of a token, in nats.
      windows: how many there were.
      left: tokens behind the last whole window, which do not count.
    """

    perplexity: float
    loss: float
    windows: int
    left: int


@jax.jit
def token_losses(
    language_model: LanguageModel, tokens: Int[Array, "batch time"]
) -> Float[Array, "batch ahead"]:
    """Returns −log p(token | those before it) of every token but the first.

    Args:
      language_model: the model with its parameters.
      tokens: `[batch, time]`.

    Returns:
      `[batch, time − 1]`, float32, in nats.
    """
    model, params = language_model.model, language_model.params
    logits, _ = model.apply(params, {}, tokens[:, :-1], train=False)
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

    Every window is foretold by itself; its first token is not counted.

    Args:
      losses: of a model, such as `token_losses` with the model bound.
      tokens: the text.
      window: tokens of a window, at least 2.
      batch: windows at once.

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
        found = np.asarray(losses(rows[start : start + batch]), np.float64)
        total += float(np.sum(np.mean(found, axis=1)))
    loss = total / count
    return Perplexity(math.exp(loss), loss, count, len(tokens) - count * window)


def check_text(time: int, window: int) -> None:
    """Raises ConfigError for texts with nothing to foretell behind the window."""
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
    """Returns −log p of what follows the tokens of a `Decoding`.

    Args:
      language_model: the model with its parameters.
      x: what is read; of its tokens those that logits are wanted for.
      following: the token behind each of these.

    Returns:
      As many, float32, in nats.
    """
    logits, _ = language_model.decode(x)
    return metrics.token_cross_entropy(logits, following)


class Answered(NamedTuple):
    """How questions of multiple choice were answered.

    Attributes:
      accuracy: share whose true ending had the largest Σ log p.
      normalized: the same for Σ log p divided by the number of tokens.
      count: questions.
    """

    accuracy: float
    normalized: float
    count: int


def answer_choices(
    losses: Losses,
    questions: Iterable[tuple[list[int], list[list[int]], int]],
    *,
    time: int,
) -> Answered:
    """Answers questions by the ending that the model finds most likely.

    Args:
      losses: of a model, as for `perplexity`.
      questions: tokens of the context, at least one, and of each ending, and which one
        is true.
      time: tokens that contexts with endings are filled up to; longer contexts lose
        their beginning.

    Raises:
      ConfigError: no question, an empty context or ending, an ending of `time` and
        more tokens, or none of the endings said to be true.
    """
    first = second = count = 0
    for context, endings, true in questions:
        lengths = [len(ending) for ending in endings]
        whole = context and lengths and min(lengths) > 0 and max(lengths) < time
        if not (whole and 0 <= true < len(endings)):
            raise ConfigError(
                f"a question needs a context, endings of 1 … {time - 1} tokens, and "
                f"which is true: got {len(context)} tokens, {lengths} and {true}"
            )
        rows = np.zeros((len(endings), time), np.int32)
        counted = np.zeros((len(endings), time - 1), bool)
        for row, real, ending in zip(rows, counted, endings, strict=True):
            whole = [*context, *ending][-time:]
            row[: len(whole)] = whole
            real[len(whole) - 1 - len(ending) : len(whole) - 1] = True
        sums = -np.sum(np.asarray(losses(rows), np.float64), axis=1, where=counted)
        first += int(np.argmax(sums) == true)
        second += int(np.argmax(sums / lengths) == true)
        count += 1
    if not count:
        raise ConfigError("there are no questions")
    return Answered(first / count, second / count, count)
