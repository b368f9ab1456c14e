"""Texts of CHAI's experiments: passages, documents of a calibration, questions."""

from typing import TYPE_CHECKING

import numpy as np

from hpcjax import data
from hpcjax.core.errors import ConfigError

if TYPE_CHECKING:
    import pathlib


# Tokens of a context and of each of its endings, and the place of the right one.
Question = tuple[list[int], list[list[int]], int]


def passages(
    tokenizer: "data.Coder", root: "pathlib.Path", count: int, time: int
) -> np.ndarray:
    """Returns pieces of held-out chapters, evenly spread, `[count, time]`.

    Raises:
      DataMissing: the King James Bible is not here.
      ConfigError: the text is shorter.
    """
    text = "".join(data.read_part(root, "kjv", "validation"))
    found = data.windows(tokenizer.encode(text), time)
    if len(found) < count:
        raise ConfigError(
            f"the text has {len(found)} pieces of {time} tokens: got passages={count}"
        )
    return found[:: len(found) // count][:count]


def documents(
    tokenizer: "data.Coder",
    root: "pathlib.Path",
    corpus: str,
    *,
    count: int,
    time: int,
    seed: int,
) -> np.ndarray:
    """Returns the first tokens of documents drawn from "train", `[count, time]`.

    Raises:
      DataMissing: the corpus is not here.
      ConfigError: too few of its documents are long enough.
    """
    texts = data.read_part(root, corpus, "train")
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(texts))
    found = []
    for number in order:
        # No need to encode a whole file: few tokens have more characters.
        tokens = tokenizer.encode(texts[number][: 16 * time])[:time]
        if len(tokens) == time:
            found.append(tokens)
        if len(found) == count:
            return np.stack(found)
    raise ConfigError(
        f"{corpus} has {len(found)} documents of {time} tokens: {count} are wanted"
    )


def questions(
    tokenizer: "data.Coder", root: "pathlib.Path", count: int, *, time: int, window: int
) -> list[Question]:
    """Returns questions which verse of four comes next; always the same ones.

    Args:
      tokenizer: of the model.
      root: the folder of data sets.
      count: how many.
      time: tokens that a context has at most with its longest ending.
      window: a context has more tokens than this.

    Raises:
      DataMissing: the King James Bible is not here.
      ConfigError: too few of its verses fit.
    """
    found: list[Question] = []
    if not count:
        return found
    for each in data.next_verse_choices(root, None):
        context = tokenizer.encode(each.context).tolist()
        endings = [tokenizer.encode(ending).tolist() for ending in each.endings]
        if window < len(context) <= time - max(map(len, endings)):
            found.append((context, endings, each.answer))
        if len(found) == count:
            return found
    raise ConfigError(
        f"{len(found)} questions fit into question_time={time} tokens: {count} are "
        "wanted"
    )
