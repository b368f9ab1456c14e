"""Multiple choice and prompts, from lines in the published formats and from texts."""

import collections
import json
import pathlib

import numpy as np
import pytest

from hpcjax import data
from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing
from hpcjax.runs import directory
from tests.data import writers

ROOT = directory.data_root(pathlib.Path(__file__).parents[2])


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


PIQA = [
    {"goal": "How do I sit?", "sol1": "Use a chair.", "sol2": "Use a lamp."},
    {"goal": "Größe messen", "sol1": "mit Wasser", "sol2": "mit einem Maßband"},
    {"goal": "dry hands", "sol1": "towel", "sol2": "soup"},
]
HELLASWAG = [
    {
        "ind": 1,
        "activity_label": "Removing ice",
        "ctx": "Then, the man writes",
        "ctx_a": "",
        "ctx_b": "",
        "endings": ["over it.", "a song.", "on.", "no."],
        "label": 3,
        "split": "val",
    },
    {
        "activity_label": "Home",
        "ctx": "[header] How to sit [title] Find a chair.",
        "endings": ["[step] Sit  down.", "b", "c", "d"],
        "label": 0,
    },
    {"ctx": "A cat", "endings": ["runs", "flies", "reads", "sings"], "label": "1"},
]
ARC = [
    {
        "id": "1",
        "question": {
            "stem": "Which is hot?",
            "choices": [
                {"text": "ice", "label": "A"},
                {"text": "fire", "label": "B"},
                {"text": "snow", "label": "C"},
                {"text": "rain", "label": "D"},
            ],
        },
        "answerKey": "B",
    },
    {
        "question": {
            "stem": "Which?",
            "choices": [{"text": "x", "label": "1"}, {"text": "y", "label": "2"}],
        },
        "answerKey": "1",
    },
    {
        "question": {
            "stem": "Of five?",
            "choices": [{"text": t, "label": t.upper()} for t in "abcde"],
        },
        "answerKey": "E",
    },
]
BOOLQ = [
    {"question": "is ice cold", "title": "Ice", "answer": True, "passage": "Ice is."},
    {"question": "is fire cold", "answer": False, "passage": "Fire is hot."},
    {"question": "is it", "answer": True, "passage": "It — is."},
]


def test_piqa(tmp_path):
    path = write_lines(tmp_path / "valid.jsonl", PIQA)
    labels = tmp_path / "valid-labels.lst"
    labels.write_text("0\n1\n0\n")
    found = data.read_piqa(path, labels)
    assert found[1] == data.Choices(
        "Question: Größe messen\nAnswer:", (" mit Wasser", " mit einem Maßband"), 1
    )
    assert [each.answer for each in found] == [0, 1, 0]
    for content, words in [
        ("0\n1\n", "lst: expected 3 labels, found 2"),
        ("0\n2\n1\n", r"lst: line 2: expected one of the labels .*found '2'"),
    ]:
        labels.write_text(content)
        with pytest.raises(DataFormatError, match=words):
            data.read_piqa(path, labels)


def test_hellaswag(tmp_path):
    found = data.read_hellaswag(write_lines(tmp_path / "val.jsonl", HELLASWAG))
    assert found == [
        (
            "Removing ice: Then, the man writes",
            (" over it.", " a song.", " on.", " no."),
            3,
        ),
        (
            "Home: How to sit. Find a chair.",
            (" Sit down.", " b", " c", " d"),
            0,
        ),
        ("A cat", (" runs", " flies", " reads", " sings"), 1),
    ]


def test_arc(tmp_path):
    found = data.read_arc(write_lines(tmp_path / "ARC-Easy-Test.jsonl", ARC))
    endings = (" ice", " fire", " snow", " rain")
    assert found[0] == ("Question: Which is hot?\nAnswer:", endings, 1)
    assert found[1] == ("Question: Which?\nAnswer:", (" x", " y"), 0)
    assert found[2].answer == 4


def test_boolq(tmp_path):
    found = data.read_boolq(write_lines(tmp_path / "val.jsonl", BOOLQ))
    assert found[2] == ("It — is.\nQuestion: is it?\nAnswer:", (" no", " yes"), 1)
    assert [each.answer for each in found] == [1, 0, 1]


@pytest.mark.parametrize(
    ("read", "good", "change", "words"),
    [
        (data.read_hellaswag, HELLASWAG, {"label": 4}, "found '4'"),
        (data.read_hellaswag, HELLASWAG, {"label": None}, "found 'None'"),
        (data.read_hellaswag, HELLASWAG, {"ctx": 3}, "'ctx' to be a str, found '3'"),
        (data.read_hellaswag, HELLASWAG, {"endings": "abcd"}, "'endings' to be a list"),
        (
            data.read_hellaswag,
            HELLASWAG,
            {"endings": [1, 2]},
            "'endings' to be strings",
        ),
        (data.read_arc, ARC, {"answerKey": "F"}, r"\['1', '2'\], found 'F'"),
        (data.read_arc, ARC, {"question": "x"}, "'question' to be a dict"),
        (
            data.read_arc,
            ARC,
            {"question": {"stem": "x", "choices": ["y"]}},
            "an object with 'label', found 'y'",
        ),
        (data.read_boolq, BOOLQ, {"answer": "yes"}, "'answer' to be a bool"),
        (data.read_boolq, BOOLQ, {"answer": 1}, "'answer' to be a bool"),
        (data.read_boolq, BOOLQ, {"passage": None}, "'passage' to be a str"),
    ],
)
def test_lines_that_are_not_in_the_format_are_named(
    tmp_path, read, good, change, words
):
    path = write_lines(tmp_path / "x.jsonl", [good[0], good[1] | change, good[2]])
    with pytest.raises(DataFormatError, match=rf"x\.jsonl: line 2: .*{words}"):
        read(path)
    path.write_text(json.dumps(good[0]) + "\n{")
    with pytest.raises(DataFormatError, match=r"line 2: expected a JSON object"):
        read(path)
    with pytest.raises(DataMissing):
        read(tmp_path / "none.jsonl")


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


def test_prompts(tmp_path):
    path = write_lines(
        tmp_path / "hellaswag.json",
        [{"prompt": "Two girls are sailing. they"}, {"prompt": "[header] Größe"}],
    )
    assert data.read_prompts(path) == ["Two girls are sailing. they", "[header] Größe"]
    write_lines(path, [{"prompt": "a"}, {"text": "b"}])
    with pytest.raises(DataFormatError, match="line 2: expected 'prompt' to be a str"):
        data.read_prompts(path)


def test_recorded_tokens(tmp_path):
    path = tmp_path / "llama-65b.txt"
    path.write_text(
        "tensor([[  518, 799, 596, 18873,  1265,\n"
        "          7875, 29991, 2]])\n"
        "tensor([[1, 2], [3, 4]], device='cuda:0')\n\n"
        "tensor([4], device='cuda:0', dtype=torch.int32)tensor([[7]])\n"
    )
    found = data.read_token_blocks(path)
    assert [each.dtype for each in found] == [np.int32] * 4
    assert [each.tolist() for each in found] == [
        [[518, 799, 596, 18873, 1265, 7875, 29991, 2]],
        [[1, 2], [3, 4]],
        [4],
        [[7]],
    ]
    path.write_text("")
    assert data.read_token_blocks(path) == []


@pytest.mark.slow
def test_recorded_tokens_are_read_as_torch_prints_them(tmp_path):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 32000, (1, size)) for size in (1, 30, 900)]
    path = tmp_path / "out.txt"
    path.write_text("\n".join(str(torch.tensor(each)) for each in arrays))
    for read, expected in zip(data.read_token_blocks(path), arrays, strict=True):
        np.testing.assert_array_equal(read, expected)
    path.write_text(str(torch.arange(2000)[None]))
    with pytest.raises(DataFormatError, match=r"line 1: .*left out by printing"):
        data.read_token_blocks(path)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("tensor([[1, 2], [3]])", "expected rows of as many numbers"),
        ("tensor([[1, -2]])", "expected numbers from 0 to 2147483647"),
        ("tensor([[2147483648]])", "expected numbers from 0"),
        ("tensor([[1.5]])", "expected whole numbers"),
        ("tensor([[1, 2]]", r"expected tensor\(\[\[…\]\]\), found 'tensor"),
        ("array([[1]])", r"found 'array"),
        ("tensor([[__import__('os')]])", r"expected tensor"),
        ("tensor([" + "[" * 5000 + "]" * 5000 + "])", "expected"),
    ],
)
def test_blocks_that_are_not_tokens_are_named(tmp_path, block, words):
    path = tmp_path / "out.txt"
    path.write_text(f"tensor([[1,\n2]])\n\n{block}\ntensor([[3]])")
    with pytest.raises(DataFormatError, match=rf"out\.txt: line 4: .*{words}"):
        data.read_token_blocks(path)
    with pytest.raises(DataMissing):
        data.read_token_blocks(tmp_path / "none.txt")
