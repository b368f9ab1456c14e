"""Multiple choice, from texts."""

import collections
import json
import pathlib

import numpy as np
import pytest

from hpcjax import data
from hpcjax.core.errors import ConfigError
from hpcjax.runs import directory
from tests.data import writers

ROOT = directory.data_root(pathlib.Path(__file__).parents[2])


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_bible(root, books=("Genesis", "1 Kings", "Jude")):
    """Each verse says where it is; Jude has one chapter only."""
    lines = [
        (f"{book} {chapter}:{verse}", f"Verse {verse} of {book} {chapter}.")
        for book in books
        for chapter in range(1, 2 if book == "Jude" else 41)
        for verse in range(1, 8)
    ]
    lines.append(("Revelation 22:21", "Amen."))
    (root / "kjv").mkdir()
    write_lines(
        root / "kjv" / "kjv.jsonl", [{"citation": c, "text": t} for c, t in lines]
    )


@pytest.mark.parametrize("part", ["train", "test"])
def test_next_verses(tmp_path, part):
    write_bible(tmp_path)
    found = data.next_verse_choices(tmp_path, 15, seed=3, part=part)
    assert len({each.context for each in found}) == len(found) == 15
    for context, endings, answer in found:
        first, second = (each.strip(". ") for each in context.split(". "))
        verse = int(first.split()[1])
        chapter = first.partition(" of ")[2]
        assert second == f"Verse {verse + 1} of {chapter}"
        assert endings[answer] == f" Verse {verse + 2} of {chapter}."
        assert len(set(endings)) == 4
        book = chapter.rpartition(" ")[0]
        for ending in endings:
            name = ending.partition(" of ")[2].strip(".")
            assert name.rpartition(" ")[0] == book
            assert data.part_of(name) == part
            assert ending[1:] not in context
    again = data.next_verse_choices(tmp_path, 15, seed=3, part=part)
    assert again == found
    assert data.next_verse_choices(tmp_path, 15, seed=4, part=part) != found


def test_questions_are_not_repeated_and_answers_stand_anywhere(tmp_path):
    write_bible(tmp_path)
    count = sum(
        5
        for book in ("Genesis", "1 Kings")
        for chapter in range(1, 41)
        if data.part_of(f"{book} {chapter}") == "train"
    ) + 5 * (data.part_of("Jude 1") == "train")
    found = data.next_verse_choices(tmp_path, count, part="train")
    assert len({each.context for each in found}) == count
    assert data.next_verse_choices(tmp_path, None, part="train") == found
    places = collections.Counter(each.answer for each in found)
    # Four deviations of a quarter.
    assert all(
        abs(places[n] - count / 4) < 4 * np.sqrt(count * 3 / 16) for n in range(4)
    )
    with pytest.raises(ConfigError, match=f"count must be at most {count} here"):
        data.next_verse_choices(tmp_path, count + 1, part="train")


def test_glosses(tmp_path):
    writers.write_wordnet(tmp_path, 400)
    for speech in ("noun", "adv"):
        synsets = {each.words[0]: each for each in data.read_wordnet(tmp_path, speech)}
        found = data.gloss_choices(tmp_path, 12, speech=speech, seed=1)
        assert found == data.gloss_choices(tmp_path, 12, speech=speech, seed=1)
        assert len(found) == 12
        for context, endings, answer in found:
            right = synsets[endings[answer].strip()]
            assert context == f"{right.definition}:"
            assert '"' not in context
            assert len(set(endings)) == 4
            for ending in endings:
                assert data.part_of(synsets[ending.strip()].name) == "test"
    with pytest.raises(ConfigError, match="count must be at most"):
        data.gloss_choices(tmp_path, 500)


def test_glosses_need_three_other_words(tmp_path):
    writers.write_wordnet(tmp_path, 40)
    path = tmp_path / "wordnet" / "data.noun"
    head, *lines = path.read_text().splitlines(keepends=True)
    held_out = [
        line for line in lines if data.part_of(f"noun:{line.split()[0]}") == "test"
    ]
    path.write_text("".join([head, *held_out[:3]]))
    with pytest.raises(ConfigError, match="expected 3 other endings"):
        data.gloss_choices(tmp_path, 1)


@pytest.mark.slow
@pytest.mark.parametrize("make", [data.next_verse_choices, data.gloss_choices])
def test_questions_of_the_real_texts(make):
    for name, file in (("kjv", "kjv.jsonl"), ("wordnet", "data.noun")):
        if not (ROOT / name / file).exists():
            pytest.skip(f"{name} is not here: hpcjax data fetch {name}")
    found = make(ROOT, 200)
    assert len(found) == 200
    assert all(len(set(endings)) == 4 for _, endings, _ in found)
