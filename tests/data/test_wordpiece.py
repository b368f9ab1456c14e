"""WordPiece against its definition, by brute force."""

import collections
import itertools
import pathlib
import unicodedata

import hypothesis
import hypothesis.strategies as st
import pytest

from hpcjax import data
from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.data.wordpiece import SPECIAL, WordPiece, split_words

# Characters whose category has not changed since Unicode 3.2.
LETTERS = st.characters(max_codepoint=0x24F) | st.sampled_from(
    "漢字—…“”\u3000\u200b\ufffd"
)


def words_by_rule(text, lowercase):
    """Character by character, in the order of BERT's published description."""
    clean = ""
    for c in text:
        kind = unicodedata.category(c)
        if c in "\t\n\r " or kind == "Zs":
            clean += " "
        elif c == "\ufffd" or kind in ("Cc", "Cf"):
            continue
        else:
            clean += f" {c} " if "\u4e00" <= c <= "\u9fff" else c
    words = []
    for token in clean.split():
        apart = unicodedata.normalize("NFD", token.lower()) if lowercase else token
        word = ""
        for c in apart:
            if lowercase and unicodedata.category(c) == "Mn":
                continue
            sign = unicodedata.category(c)[0] == "P" or c in "$+<=>^`|~"
            words += [word, c] if sign else []
            word = "" if sign else word + c
        words.append(word)
    return [word for word in words if word]


@hypothesis.given(st.text(LETTERS, max_size=30), st.booleans())
@hypothesis.settings(max_examples=300)
def test_words_are_split_as_described(text, lowercase):
    assert split_words(text, lowercase) == words_by_rule(text, lowercase)


def pieces_by_rule(word, pieces):
    """Every way to cut the word, the one with the longest first piece before others."""
    if len(word) > 100:
        return ["[UNK]"]
    found, rest = [], word
    while rest:
        marked = [("##" if found else "") + rest[:n] for n in range(1, len(rest) + 1)]
        fitting = [piece for piece in marked if piece in pieces]
        if not fitting:
            return ["[UNK]"]
        found.append(max(fitting, key=len))
        rest = rest[len(found[-1].removeprefix("##")) :]
        if found == ["##"]:
            raise AssertionError
    return found


@hypothesis.given(
    st.text("ab", min_size=1, max_size=8),
    st.sets(st.from_regex(r"\A(##)?[ab]{1,3}\Z"), max_size=12),
)
@hypothesis.settings(max_examples=300)
def test_words_become_the_longest_pieces(word, pieces):
    coder = WordPiece([*SPECIAL, *sorted(pieces)])
    found = [coder.pieces[code] for code in coder.encode(word)]
    assert found == pieces_by_rule(word, pieces)


def test_a_word_of_more_than_a_hundred_letters_is_unknown():
    coder = WordPiece([*SPECIAL, "a", "##a"])
    assert len(coder.encode("a" * 100)) == 100
    assert coder.encode("a" * 101).tolist() == [coder.unknown]


def vocabulary_by_rule(words, size):
    """Counts all pairs anew for every piece."""
    words = [[w[0], *(f"##{c}" for c in w[1:])] for w in words]
    pieces = [*SPECIAL, *sorted({piece for word in words for piece in word})]
    while len(pieces) < size:
        often = collections.Counter(p for w in words for p in itertools.pairwise(w))
        most = max(often.values(), default=0)
        if most < 2:
            break
        left, right = min(pair for pair, count in often.items() if count == most)
        joined = left + right.removeprefix("##")
        if joined not in pieces:
            pieces.append(joined)
        for word in words:
            at = 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == (left, right):
                    word[at : at + 2] = [joined]
                at += 1
    return pieces


@hypothesis.given(
    st.lists(st.text("abc", min_size=1, max_size=7), min_size=1, max_size=25),
    st.integers(11, 40),
)
@hypothesis.settings(max_examples=300)
def test_the_vocabulary_is_that_of_counting_anew(words, size):
    found = data.train_vocabulary([" ".join(words)], size)
    assert found == vocabulary_by_rule(words, size)


def test_a_vocabulary_depends_on_how_often_words_occur_and_nothing_else():
    words = ["the", "cat", "sees", "the", "other", "cat", "and", "the", "bird"]
    expected = data.train_vocabulary([" ".join(words)], 60)
    assert data.train_vocabulary(words[::-1], 60) == expected
    assert data.train_vocabulary([" ".join(words[4:] + words[:4])], 60) == expected


def test_a_vocabulary_smaller_than_the_alphabet_is_refused():
    with pytest.raises(ConfigError, match="3 characters of the text: got vocabulary=7"):
        data.train_vocabulary(["abc"], 7)


@pytest.mark.parametrize("lowercase", [True, False])
def test_codes_are_those_of_the_package(lowercase):
    """On real text, and on every character of Unicode's first blocks and of CJK."""
    tokenizers = pytest.importorskip("tokenizers", reason="the package is the oracle")
    text = (pathlib.Path(__file__).parents[2] / "docs" / "house.md").read_text()
    pieces = data.train_vocabulary([text, "größe œuvre 漢字"], 300, lowercase=lowercase)
    theirs = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(
            {piece: code for code, piece in enumerate(pieces)},
            unk_token="[UNK]",
            max_input_chars_per_word=100,
        )
    )
    theirs.normalizer = tokenizers.normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=lowercase,
        lowercase=lowercase,
    )
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    coder = WordPiece(pieces, lowercase)
    points = [*range(0x590), *range(0x2000, 0x2070), *range(0x4E00, 0x4E40)]
    points += [*range(0x20000, 0x20010), *range(0xFF00, 0xFF60), 0xFFFD]
    words = [f"gr{chr(point)}s in {chr(point)}." for point in points]
    for each in [text, "größe " * 20, "a" * 101, *words]:
        expected = theirs.encode(each, add_special_tokens=False).ids
        assert coder.encode(each).tolist() == expected, each


def test_vocabulary_files(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join([*SPECIAL, "naïve", "##s"]) + "\n", encoding="utf-8")
    assert data.read_vocabulary(path) == [*SPECIAL, "naïve", "##s"]
    for content, words in [
        ("a\na\n", "line 2: expected a piece that is not there yet, found 'a'"),
        ("a\n\nb\n", "line 2: .*found ''"),
        ("a\nb\n", r"found no \['\[PAD\]'"),
    ]:
        path.write_text(content)
        with pytest.raises(DataFormatError, match=words):
            data.read_vocabulary(path)
