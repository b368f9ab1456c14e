"""Multiple-choice questions, made from texts."""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpcjax.core.errors import ConfigError
from hpcjax.data import corpora, text, wordnet
from hpcjax.data.corpora import Part
from hpcjax.data.wordnet import Speech, Synset

CHOICES = 4


class Choices(NamedTuple):
    """A multiple-choice question, answered by the ending that a model finds likeliest.

    Attributes:
      context: the text before the endings.
      endings: the possible continuations, each with its leading space.
      answer: index of the right ending.
    """

    context: str
    endings: tuple[str, ...]
    answer: int


def next_verse_choices(
    root: pathlib.Path, count: int | None, *, seed: int = 0, part: Part = "test"
) -> list[Choices]:
    """Makes questions from "kjv": which verse follows two verses of a chapter?

    Wrong endings are three other verses of the same book. All are from one part (see
    `part_of`), so that a model trained on "train" has seen none of them.

    Args:
      root: the data root.
      count: number of questions, drawn at random; None for all.
      seed: of the draws of questions, wrong endings and their order.
      part: the part of the corpus.

    Raises:
      ConfigError: `count` is larger than the number of possible questions.
      DataMissing: the text is not below `root`.
      DataFormatError: it is damaged.
    """
    books: dict[str, list[list[str]]] = {}
    for name, verses in text.read_chapters(root).items():
        if corpora.part_of(name) == part:
            books.setdefault(name.rpartition(" ")[0], []).append(verses)
    places = [
        (book, verses, at)
        for book, chapters in books.items()
        # A question needs two verses of context, one right and three wrong ones.
        if len({verse for each in chapters for verse in each}) >= CHOICES + 2
        for verses in chapters
        for at in range(len(verses) - 2)
    ]
    rng = np.random.Generator(np.random.Philox(seed))
    questions = []
    for number in _draw(rng, len(places), count):
        book, verses, at = places[number]
        first, second, right = verses[at : at + 3]
        others = {verse for each in books[book] for verse in each}
        wrong = sorted(others - {first, second, right})
        questions.append(_make_question(rng, f"{first} {second}", right, wrong))
    return questions


def gloss_choices(
    root: pathlib.Path,
    count: int,
    *,
    speech: Speech = "noun",
    seed: int = 0,
    part: Part = "test",
) -> list[Choices]:
    """Makes questions from "wordnet": which word has this definition?

    Wrong endings are words of three other synsets of the same part of speech that are
    not in the right synset.

    Args:
      root: the data root.
      count: number of questions.
      speech: "noun", "verb", "adj" or "adv".
      seed: of the draws of questions, wrong words and their order.
      part: the part of the corpus, see `part_of`.

    Raises:
      ConfigError: there are not so many synsets.
      DataMissing: WordNet is not below `root`.
      DataFormatError: it is damaged.
    """
    synsets = [
        each
        for each in wordnet.read_wordnet(root, speech)
        if corpora.part_of(each.name) == part
    ]
    rng = np.random.Generator(np.random.Philox(seed))
    questions = []
    for number in _draw(rng, len(synsets), count):
        synset: Synset = synsets[number]
        wrong: list[str] = []
        for other in rng.permutation(len(synsets)):
            word = synsets[other].words[0]
            if word not in synset.words and word not in wrong:
                wrong.append(word)
            if len(wrong) == CHOICES - 1:
                break
        context = f"{synset.definition}:"
        questions.append(_make_question(rng, context, synset.words[0], wrong))
    return questions


def _draw(rng: np.random.Generator, size: int, count: int | None) -> list[int]:
    count = size if count is None else count
    if not 0 <= count <= size:
        raise ConfigError(f"count must be at most {size} here: got count={count}")
    return rng.permutation(size)[:count].tolist()


def _make_question(
    rng: np.random.Generator, context: str, right: str, wrong: Sequence[str]
) -> Choices:
    """Returns a question with the right ending at a random place among three wrong."""
    if len(wrong) < CHOICES - 1:
        raise ConfigError(
            f"expected {CHOICES - 1} other endings of {context[:40]!r}, found "
            f"{len(wrong)}"
        )
    drawn = rng.permutation(len(wrong))[: CHOICES - 1]
    answer = int(rng.integers(CHOICES))
    endings = [f" {wrong[number]}" for number in drawn]
    endings.insert(answer, f" {right}")
    return Choices(context, tuple(endings), answer)
