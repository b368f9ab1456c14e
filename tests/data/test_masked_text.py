"""Masked pairs of sentences against what the documents hold."""

import collections

import numpy as np
import pytest

from hpcjax import data
from hpcjax.core.errors import DataFormatError, DataMissing
from hpcjax.data import masked_text, text
from hpcjax.data.wordpiece import SPECIAL, WordPiece
from tests.data import writers

CODER = WordPiece([*SPECIAL, *(f"w{n}" for n in range(995))])


def documents(count=30, seed=0):
    """Every token of a document is the document's number, then the place in it."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        sizes = rng.integers(1, 12, rng.integers(1, 9))
        codes = rng.integers(5, 1000, sizes.sum()).astype(np.int32)
        made.append(np.split(codes, np.cumsum(sizes)[:-1]))
    return made


def source(**options):
    settings = {"context": 40, "copies": 20} | options
    return data.MaskedSource(documents(), CODER, **settings)


def gathered(read):
    return read.gather(np.arange(len(read)))


def runs(codes):
    """The joined text of every run of codes, for telling where something is from."""
    return ",".join(map(str, codes)) + ","


def test_sequences_are_pairs_of_the_documents_sentences():
    read = source()
    batch = gathered(read)
    texts = [runs(np.concatenate(part)) for part in documents()]
    orders = collections.Counter()
    for index, tokens in enumerate(batch["y"]):
        number, first, end = read.chunks[index % len(read.chunks)]
        real = batch["x"][index, :, 2] == 1
        length = int(real.sum())
        assert real[:length].all()
        assert (tokens[length:] == CODER.pad).all()
        assert tokens[0] == CODER.start
        cut = int(np.flatnonzero(tokens == CODER.end)[0])
        assert np.flatnonzero(tokens == CODER.end).tolist() == [cut, length - 1]
        types = np.zeros(40)
        types[cut + 1 : length] = 1
        np.testing.assert_array_equal(batch["x"][index, :, 1], types)
        a, b = runs(tokens[1:cut]), runs(tokens[cut + 1 : length - 1])
        assert a in texts[number]
        whole = runs(np.concatenate(documents()[number][first:end]))
        strange = batch["order"][index]
        orders[int(strange), end - first > 1] += 1
        if strange:
            assert b not in whole
            assert any(b in other for n, other in enumerate(texts) if n != number)
        else:
            assert a in whole
            assert b in whole
            assert whole.index(a) < whole.rindex(b)
    assert orders[0, False] == 0
    pairs = orders[0, True] + orders[1, True]
    assert abs(orders[1, True] / pairs - 0.5) < 4 * 0.5 / np.sqrt(pairs)


def sentence(rng):
    """Begins with token 5 and ends with 6, which are nowhere else."""
    return np.array([5, *rng.integers(7, 1000, rng.integers(1, 14)), 6], np.int32)


def test_where_a_pair_is_cut_does_not_tell_its_order():
    rng = np.random.default_rng(0)
    made = [[sentence(rng) for _ in range(rng.integers(2, 20))] for _ in range(60)]
    read = data.MaskedSource(made, CODER, context=40, copies=40)
    batch, firsts = gathered(read), {tuple(document[0][1:4]) for document in made}
    several, at_first = [], []
    seen = collections.defaultdict(collections.Counter)
    for index, tokens in enumerate(batch["y"]):
        _, first, end = read.chunks[index % len(read.chunks)]
        if end - first == 1:
            continue
        strange = int(batch["order"][index])
        cut, last = np.flatnonzero(tokens == CODER.end)
        a, b = tokens[1:cut], tokens[cut + 1 : last]
        marks = a[0] == 5, a[-1] == 6, b[0] == 5, b[-1] == 6, len(b) == 1
        seen[marks][strange] += 1
        several.append((a == 5).sum() > 1)
        if strange and b[0] == 5:
            at_first.append(tuple(b[1:4]) in firsts)
    count = sum(each.total() for each in seen.values())
    # The best that can be guessed of them; 0.55 by the rule of BERT's code.
    assert sum(max(each.values()) for each in seen.values()) < 0.55 * count
    strange = sum(each[1] for each in seen.values()) / count
    assert abs(strange - 0.5) < 3 * 0.5 / np.sqrt(count)
    # A ends anywhere in its chunk, B begins anywhere in its document.
    assert np.mean(several) > 0.3
    assert np.mean(at_first) < 0.3


def test_a_seventh_is_scored_and_of_that_eight_tenths_masked():
    batch = gathered(source())
    seen, tokens, scored = batch["x"][..., 0], batch["y"], batch["scored"] == 1
    np.testing.assert_array_equal(seen[~scored], tokens[~scored])
    assert not np.isin(tokens[scored], [CODER.start, CODER.end, CODER.pad]).any()
    lengths = batch["x"][..., 2].sum(1)
    wanted = np.maximum(1, np.round(0.15 * lengths))
    np.testing.assert_array_equal(scored.sum(1), np.minimum(wanted, lengths - 3))
    total = scored.sum()
    masked = seen[scored] == CODER.mask
    kept = seen[scored] == tokens[scored]
    for share, found in ((0.8, masked), (0.1, kept), (0.1, ~masked & ~kept)):
        # Four deviations of a binomial share; one random piece in 1000 is the same.
        assert abs(found.mean() - share) < 4 * np.sqrt(share * (1 - share) / total)
    strange = seen[scored][~masked & ~kept]
    assert len(np.unique(strange)) > 0.3 * len(strange)
    real = (batch["x"][..., 2] == 1) & ~np.isin(tokens, [CODER.start, CODER.end])
    shares = scored[:, 1:20].sum(0) / real[:, 1:20].sum(0)
    assert (abs(shares / shares.mean() - 1) < 0.25).all()


def test_draws_belong_to_the_example_and_the_seed():
    read = source()
    count = len(read.chunks)
    both = read.gather(np.array([3, 3 + count, 3]))
    np.testing.assert_array_equal(both["x"][0], both["x"][2])
    assert (both["x"][0] != both["x"][1]).any()
    alone = source(copies=1).gather(np.array([3]))
    np.testing.assert_array_equal(alone["x"][0], both["x"][0])
    other = source(draw_seed=1).gather(np.array([3]))
    assert (other["x"][0] != both["x"][0]).any()


def cut_one_by_one(first, second, most):
    first, second = list(first), list(second)
    while len(first) + len(second) > most:
        (first if len(first) > len(second) else second).pop()
    return len(first), len(second)


def test_what_is_too_long_is_cut_as_if_token_by_token():
    rng = np.random.default_rng(0)
    for _ in range(300):
        a, b, most = rng.integers(1, 30), rng.integers(1, 30), rng.integers(2, 40)
        first, second = np.arange(a), 100 + np.arange(b)
        found = masked_text.truncate(first, second, int(most), rng)
        assert tuple(map(len, found)) == cut_one_by_one(first, second, most)
        for part in found:
            np.testing.assert_array_equal(part, part[0] + np.arange(len(part)))
    long = np.arange(402)
    cut = [masked_text.truncate(long, long, 4, rng)[0][0] for _ in range(50)]
    # Five deviations of 400 tosses.
    assert max(abs(np.array(cut) - 200)) < 5 * 10
    assert len(set(cut)) > 3


def test_every_sentence_is_in_one_chunk():
    for document in documents():
        found = masked_text.chunks(document, 15)
        covered = [n for first, end in found for n in range(first, end)]
        assert covered == list(range(len(document)))
        for first, end in found[:-1]:
            sizes = [len(sentence) for sentence in document[first:end]]
            assert sum(sizes) >= 15 > sum(sizes[:-1])


def test_documents_of_a_file_are_parted_by_blank_lines(tmp_path):
    (tmp_path / "text").mkdir()
    content = "\n\nOne here.\r\n Two. \n\n  \n\nThree\u2028x.\nFour.\nFive.\n\n"
    (tmp_path / "text" / "own.txt").write_bytes(content.encode())
    read = text.read_documents(tmp_path, "own.txt")
    assert read == [["One here.", "Two."], ["Three\u2028x.", "Four.", "Five."]]


def test_chapters_and_topics_are_documents(tmp_path):
    writers.write_kjv(tmp_path, 20)
    chapters = text.read_documents(tmp_path, "kjv")
    assert [len(chapter) for chapter in chapters] == [*[2] * 9, 1, 1]
    topics = text.read_documents(tmp_path, "python-reference")
    assert len(topics) > 50
    assert min(map(len, topics)) >= 1


def test_the_vocabulary_and_the_training_part_know_nothing_of_the_rest(tmp_path):
    (tmp_path / "text").mkdir()
    letters = "abcdefghijklmnopqrst"
    parts = [f"{c}{c}\n{c}{c}{c} {c}\n{c}" for c in letters]
    (tmp_path / "text" / "own.txt").write_text("\n\n".join(parts))
    settings = data.MaskedTextConfig(corpus="own.txt", context=8, validation=0.25)
    read = settings.load(tmp_path)
    known = {piece[-1] for piece in read.train.coder.pieces[len(SPECIAL) :]}
    assert len(known) == 15
    assert read.outputs == len(read.train.coder)
    assert read.train.coder.unknown not in gathered(read.train)["y"]
    held_out = gathered(read.validation)["y"]
    assert set(np.unique(held_out)) <= {0, 1, 2, 3}
    assert (held_out == read.train.coder.unknown).any()


def test_a_vocabulary_file_is_used_as_it_is(tmp_path):
    writers.write_documents(tmp_path, 20)
    settings = data.MaskedTextConfig(
        corpus="documents.txt",
        context=16,
        vocabulary_file="vocab.txt",
        copies=1,
        validation=0.3,
    )
    with pytest.raises(DataMissing, match=r"vocab\.txt"):
        settings.load(tmp_path)
    pieces = [*SPECIAL[::-1], "cat", "the"]
    (tmp_path / "text" / "vocab.txt").write_text("\n".join(pieces) + "\n")
    read = settings.load(tmp_path)
    assert read.train.coder.pieces == pieces
    tokens = gathered(read.train)["y"]
    assert (tokens[:, 0] == pieces.index("[CLS]")).all()
    assert {pieces.index(word) for word in ("cat", "the")} <= set(np.unique(tokens))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "two documents or more in the training part, found 0"),
        ("a\nb\n\nc\n\nd", "in the validation part, found 1"),
        ("\n\n".join("abcdef") + "\n\n\u200b", "in the validation part, found 1"),
    ],
)
def test_too_few_documents_are_refused(tmp_path, content, words):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "own.txt").write_text(content, encoding="utf-8")
    with pytest.raises(DataFormatError, match=words):
        data.MaskedTextConfig(corpus="own.txt", context=8, validation=0.15).load(
            tmp_path
        )
