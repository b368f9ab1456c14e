"""Multiple-choice questions: in published formats, and made from texts."""

import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.data import corpora, text, wordnet
from hpcjax.data.corpora import Part
from hpcjax.data.records import field, read_lines, read_records
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


def read_piqa(path: pathlib.Path, labels: pathlib.Path) -> list[Choices]:
    """Reads PIQA: `valid.jsonl` with "goal", "sol1", "sol2", and `valid-labels.lst`.

    Raises:
      DataMissing: a file is not there.
      DataFormatError: a line is not in the format, or there are not as many labels.
    """
    answers = list(read_lines(labels))
    records = list(read_records(path))
    if len(answers) != len(records):
        raise DataFormatError(
            f"{labels}: expected {len(records)} labels, found {len(answers)}"
        )
    return [
        Choices(
            f"Question: {field(record, 'goal', str, place)}\nAnswer:",
            tuple(f" {field(record, name, str, place)}" for name in ("sol1", "sol2")),
            _answer(label.strip(), ("0", "1"), label_place),
        )
        for (place, record), (label_place, label) in zip(records, answers, strict=True)
    ]


def read_hellaswag(path: pathlib.Path) -> list[Choices]:
    """Reads HellaSwag: JSON lines with "ctx", "endings" and "label".

    An "activity_label" is put before the context, and marks such as "[step]" are
    removed.

    Raises:
      DataMissing: no such file.
      DataFormatError: a line is not in the format.
    """
    questions = []
    for place, record in read_records(path):
        endings = _strings(field(record, "endings", list, place), "endings", place)
        label = record.get("label")
        context = field(record, "ctx", str, place)
        if "activity_label" in record:
            context = f"{field(record, 'activity_label', str, place)}: {context}"
        answer = _answer(str(label), tuple(map(str, range(len(endings)))), place)
        cleaned = tuple(f" {_remove_marks(each)}" for each in endings)
        questions.append(Choices(_remove_marks(context), cleaned, answer))
    return questions


def read_arc(path: pathlib.Path) -> list[Choices]:
    """Reads ARC: {"question": {"stem", "choices": [{"text", "label"}]}, "answerKey"}.

    Raises:
      DataMissing: no such file.
      DataFormatError: a line is not in the format.
    """
    questions = []
    for place, record in read_records(path):
        question = field(record, "question", dict, place)
        choices = field(question, "choices", list, place)
        names = tuple(field(choice, "label", str, place) for choice in choices)
        questions.append(
            Choices(
                f"Question: {field(question, 'stem', str, place)}\nAnswer:",
                tuple(f" {field(choice, 'text', str, place)}" for choice in choices),
                _answer(field(record, "answerKey", str, place), names, place),
            )
        )
    return questions


def read_boolq(path: pathlib.Path) -> list[Choices]:
    """Reads BoolQ: JSON lines with "question", "passage" and "answer", true or false.

    The endings are " no" and " yes".

    Raises:
      DataMissing: no such file.
      DataFormatError: a line is not in the format.
    """
    return [
        Choices(
            f"{field(record, 'passage', str, place)}\n"
            f"Question: {field(record, 'question', str, place)}?\nAnswer:",
            (" no", " yes"),
            int(field(record, "answer", bool, place)),
        )
        for place, record in read_records(path)
    ]


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


def _answer(label: str, names: Sequence[str], place: str) -> int:
    if label not in names:
        raise DataFormatError(
            f"{place}: expected one of the labels {list(names)}, found {label!r}"
        )
    return names.index(label)


def _strings(values: list[Any], name: str, place: str) -> list[str]:
    for value in values:
        if not isinstance(value, str):
            raise DataFormatError(
                f"{place}: expected {name!r} to be strings, found {str(value)[:40]!r}"
            )
    return values


def _remove_marks(words: str) -> str:
    words = words.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", words).replace("  ", " ").strip()


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
