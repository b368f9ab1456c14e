"""Tokenizers against transformers, a plain byte-pair coder and published ids."""

import itertools
import json
import pathlib
import subprocess
import sys
import unicodedata

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from hpcjax import data
from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing, UnsupportedOp
from hpcjax.data import catalog, tokenizer
from hpcjax.data.tokenizer import byte_pair_tokenizer
from hpcjax.data.wordpiece import SPECIAL
from hpcjax.models import pretrained
from hpcjax.runs import directory

tokenizers = pytest.importorskip("tokenizers", reason="the extra `text` is missing")
ROOT = pathlib.Path(__file__).parents[2]
PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PLAIN]
SIGNS = {byte: chr(byte) for byte in PLAIN} | {
    byte: chr(256 + number) for number, byte in enumerate(OTHERS)
}
TEXTS = [
    "It's 2024: we'll pay 1,299.50 €, won't we?",
    "  two  spaces\n\n\tand a tab \r\n",
    "Größe naïve Ελληνικά русский 漢字 かな العربية ไทย 👩‍👩‍👧 e\u0301",
    "x = [1, 22, 333]  # ½ ² Ⅷ ٣\n",
    "a\u00a0b\u2028c\u3000d",
    "def f(n):\n    return n_1 + __x__ if n else 'it''s'\n",
    "",
    " ",
]
ANY = st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=40)


def split_by_rule(text, single_digits):
    """GPT-2's words, by hand: contractions, then runs of one sort of character."""

    def sort(c):
        return {"L": "letter", "N": "number"}.get(unicodedata.category(c)[0], "sign")

    def is_space(c):
        return c.isspace() and c not in "\x1c\x1d\x1e\x1f"

    pieces, at = [""], 0
    for c in text:
        if single_digits and sort(c) == "number":
            pieces += [c, ""]
        else:
            pieces[-1] += c
    words = []
    for piece in pieces:
        at = 0
        while at < len(piece):
            short = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
            end = next((at + len(s) for s in short if piece.startswith(s, at)), at)
            begin = at + (piece[at] == " " and piece[at + 1 : at + 2] != "")
            if end == at and not is_space(piece[begin]):
                kind, end = sort(piece[begin]), begin
                while (
                    end < len(piece)
                    and not is_space(piece[end])
                    and sort(piece[end]) == kind
                ):
                    end += 1
            elif end == at:
                while end < len(piece) and is_space(piece[end]):
                    end += 1
                # The last space belongs to the word behind it.
                end -= end < len(piece) and end - at > 1
            words.append(piece[at:end])
            at = end
    return words


def encode_by_rule(text, codes, ranks, single_digits):
    found = []
    for word in split_by_rule(text, single_digits):
        parts = [SIGNS[byte] for byte in word.encode()]
        parts = [part for part in parts if part in codes]
        while True:
            pairs = [
                (ranks.get((a, b), 1e9), n)
                for n, (a, b) in enumerate(itertools.pairwise(parts))
            ]
            rank, at = min(pairs, default=(1e9, 0))
            if rank == 1e9:
                break
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
        found += [codes[part] for part in parts]
    return found


@pytest.fixture(scope="module")
def library():
    """Tokens and merges trained on Python's own help."""
    text = data.read_part(pathlib.Path(), "python-reference")
    inner = json.loads(data.train_byte_pairs(text, 900).inner.to_str())["model"]
    merges = [" ".join(merge) for merge in inner["merges"]]
    return sorted(inner["vocab"], key=inner["vocab"].get), merges


@pytest.mark.parametrize("pre", ["gpt-2", "smollm"])
def test_byte_pairs_are_those_of_the_rule(library, pre):
    tokens, merges = library
    coder = byte_pair_tokenizer(tokens, merges, pre=pre)
    codes = {token: code for code, token in enumerate(tokens)}
    ranks = {tuple(merge.split()): rank for rank, merge in enumerate(merges)}

    @hypothesis.given(ANY)
    @hypothesis.settings(max_examples=300)
    def check(text):
        found = coder.encode(text)
        assert found.dtype == np.int32
        assert found.tolist() == encode_by_rule(text, codes, ranks, pre == "smollm")
        assert coder.decode(found) == text

    for text in TEXTS:
        check = hypothesis.example(text)(check)
    check()


def test_digits_stand_alone_where_they_should(library):
    tokens, merges = library
    tokens, merges = [*tokens, "12"], [*merges, "1 2"]
    together = byte_pair_tokenizer(tokens, merges)
    alone = byte_pair_tokenizer(tokens, merges, pre="smollm")
    assert together.encode("12").tolist() == [tokens.index("12")]
    assert alone.encode("12").tolist() == [tokens.index("1"), tokens.index("2")]


def test_words_of_llama_3(library):
    coder = byte_pair_tokenizer(*library, pre="llama-bpe")
    words = [
        "Hello",
        " world",
        "'S",
        " ",
        "123",
        "45",
        "!?\n",
        "  ",
        " x",
        "-y",
        "\n \n",
    ]
    words += [" ...", " "]
    found = coder.inner.pre_tokenizer.pre_tokenize_str("".join(words))
    assert ["".join(words)[slice(*span)] for _, span in found] == words
    # No merge makes "abc", but it is a token: then it is not cut into "ab" and "c".
    tokens = ["a", "b", "c", "ab", "abc"]
    whole, cut = (
        byte_pair_tokenizer(tokens, ["a b"], pre=pre).encode("abc").tolist()
        for pre in ("llama-bpe", "gpt-2")
    )
    assert (whole, cut) == ([4], [3, 2])


def test_special_tokens_are_never_cut():
    tokens = ["<", "s", ">", "<s>", "<x>", "x"]
    coder = byte_pair_tokenizer(tokens, [], types=[1, 1, 1, 3, 4, 1], bos=3, eos=4)
    assert (coder.bos, coder.eos, len(coder)) == (3, 4, 6)
    assert coder.vocabulary == tokens
    found = coder.encode("<s>x<x>")
    assert found.tolist() == [3, 5, 4]
    assert coder.decode(found) == "<s>x<x>"
    assert coder.decode(found, special=False) == "x"
    plain = byte_pair_tokenizer(tokens, [])
    assert plain.encode("<s>").tolist() == [0, 1, 2]
    assert (plain.bos, plain.eos) == (None, None)


def test_bytes_without_a_token():
    assert byte_pair_tokenizer(["a", "b"], []).encode("axb").tolist() == [0, 1]
    marked = byte_pair_tokenizer(["a", "b", "?"], [], unknown=2)
    assert marked.encode("axb").tolist() == [0, 2, 1]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda f: f(["a", "a"], []), DataFormatError, "token 1: .*found 'a'"),
        (lambda f: f(["a", "b"], ["a b"]), DataFormatError, "merge 0: .*'a b'"),
        (lambda f: f(["a"], ["a"]), DataFormatError, "merge 0: .*'a'"),
        (lambda f: f(["a"], [], eos=1), DataFormatError, "eos must be a code of the 1"),
        (lambda f: f(["a"], [], types=[1, 1]), DataFormatError, "found 2"),
        (lambda f: f(["a"], [], pre="llama"), UnsupportedOp, "'llama'.*'llama-bpe'"),
    ],
)
def test_vocabularies_that_cannot_be_are_refused(make, error, words):
    with pytest.raises(error, match=words):
        make(byte_pair_tokenizer)


def test_metadata_that_cannot_be_is_refused():
    with pytest.raises(UnsupportedOp, match="must be 'gpt2': got 'llama'"):
        data.gguf_tokenizer({"tokenizer.ggml.model": "llama"})
    with pytest.raises(
        DataFormatError, match=r"'tokenizer\.ggml\.merges' to be a list, found 'None'"
    ):
        data.gguf_tokenizer(
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]}
        )


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tokens", [1, 2], r"'tokenizer.ggml.tokens' to be strings, found \[1, 2\]"),
        ("tokens", 3, "tokens' to be a list, found '3'"),
        ("merges", [1], r"merges' to be strings, found \[1\]"),
        ("eos_token_id", "b", "eos_token_id' to be a int, found 'b'"),
        ("token_type", 3, "a type for each of 2 tokens, found 1"),
        ("pre", ["gpt-2"], "pre' to be a str"),
    ],
)
def test_metadata_of_other_types_are_refused(key, value, words):
    known = {"model": "gpt2", "tokens": ["a", "b"], "merges": [], key: value}
    with pytest.raises(DataFormatError, match=words):
        data.gguf_tokenizer({f"tokenizer.ggml.{k}": v for k, v in known.items()})


def test_types_may_be_an_array():
    types = np.array([1, 3])
    coder = byte_pair_tokenizer(["a", "<s>"], [], types=types)
    assert coder.encode("a<s>").tolist() == [0, 1]
    assert coder.decode(np.array([0, 1]), special=False) == "a"


def test_codes_and_texts_that_cannot_be_are_refused():
    coder = byte_pair_tokenizer(["a"], [])
    for code in (-1, 1):
        with pytest.raises(IndexError, match=r"in \[0, 1\)"):
            coder.decode(np.array([0, code]))
    with pytest.raises(DataFormatError, match=r"text 1: character 1: .*U\+D800"):
        coder.encode_all(["a", "a\ud800"])
    with pytest.raises(DataFormatError, match="text 700: character 0"):
        coder.encode_all([*["a"] * 700, "\ud800"])
    lengths = [number % 5 for number in range(700)]
    found = coder.encode_all("a" * length for length in lengths)
    assert [len(codes) for codes in found] == lengths
    with pytest.raises(ConfigError, match="has no token '</s>'"):
        data.Tokenizer(coder.inner, eos="</s>")
    assert coder.decode(np.array([], np.int32)) == ""


def test_trained_vocabularies_hold_any_text_and_are_the_same_elsewhere():
    code = (
        "import hashlib, pathlib; from hpcjax import data;"
        "texts = data.read_part(pathlib.Path(), 'python-reference');"
        "made = data.train_byte_pairs(texts, 1000);"
        "print(hashlib.sha1(made.inner.to_str().encode()).hexdigest(), len(made))"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(runs) == 1
    assert runs.pop().split()[1] == "1000"
    coder = data.train_byte_pairs(["abc abd"], 300)
    assert coder.vocabulary[0] == "<|endoftext|>"
    assert coder.eos == 0
    assert len(coder) == 258  # the bytes, the end, and "ab"
    for text in TEXTS:
        assert coder.decode(coder.encode(text)) == text
    with pytest.raises(ConfigError, match=r"at least 257, .*: got 256"):
        data.train_byte_pairs(["a"], 256)


def test_files(tmp_path):
    made = data.train_byte_pairs(["abc abd"], 300)
    made.inner.enable_truncation(1)
    made.inner.enable_padding(length=9)
    path = tmp_path / "tokenizer.json"
    path.write_text(made.inner.to_str())
    read = data.load_tokenizer(path, eos="<|endoftext|>")
    assert isinstance(read, data.Coder)
    assert (
        read.encode("abc").tolist()
        == byte_pair_tokenizer(made.vocabulary, ["a b"]).encode("abc").tolist()
    )
    assert read.eos == 0
    assert read.bos is None
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL, "bird", "##s", "!"]))
    words = data.load_tokenizer(tmp_path / "vocab.txt")
    assert isinstance(words, data.Coder)
    assert words.encode("Birds!").tolist() == [5, 6, 7]
    assert words.decode(words.encode("Birds!")) == "birds !"
    with pytest.raises(IndexError, match=r"in \[0, 8\)"):
        words.decode(np.array([8]))
    for name in ("none.json", "none.txt"):
        with pytest.raises(DataMissing, match=name):
            data.load_tokenizer(tmp_path / name)
    for content in ("{}", "", path.read_text()[:-9]):
        path.write_text(content)
        with pytest.raises(DataFormatError, match=r"tokenizer\.json: expected"):
            data.load_tokenizer(path)


def test_the_package_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'hpcjax\[text\]'"):
        byte_pair_tokenizer(["a"], [])
    with pytest.raises(ConfigError, match=r"pip install 'hpcjax\[text\]'"):
        data.TokenTextConfig().load(pathlib.Path())


def fetched(name, file):
    path = catalog.find(directory.data_root(ROOT), name, file)
    if path is None:
        pytest.skip(f"{name} is not here: hpcjax data fetch {name}")
    return path


@pytest.fixture(scope="module")
def smollm2():
    return pretrained.read_gguf(fetched("smollm2", catalog.SMOLLM2)).metadata


@pytest.mark.slow
def test_smollm2(smollm2):
    coder = data.gguf_tokenizer(smollm2)
    tokens = smollm2["tokenizer.ggml.tokens"]
    assert len(coder) == 49152
    assert coder.vocabulary == tokens
    assert (coder.bos, coder.eos) == (1, 2)
    begin = coder.encode("<|im_start|>user\nHi<|im_end|>")
    assert begin[[0, -1]].tolist() == [1, 2]
    assert tokens[begin[1]] == "user"
    assert coder.encode("2024").tolist() == [tokens.index(digit) for digit in "2024"]
    codes = {token: code for code, token in enumerate(tokens)}
    ranks = {
        tuple(merge.split(" ")): rank
        for rank, merge in enumerate(smollm2["tokenizer.ggml.merges"])
    }
    for text in TEXTS:
        found = coder.encode(text)
        assert found.tolist() == encode_by_rule(text, codes, ranks, True)
        assert coder.decode(found) == text
    verses = data.read_part(directory.data_root(ROOT), "python-reference")[:5]
    for text in verses:
        assert coder.decode(coder.encode(text)) == text


@pytest.mark.slow
def test_smollm2_equals_transformers_but_for_digits(smollm2):
    """There digits are not parted when the vocabulary comes from GGUF."""
    transformers = pytest.importorskip("transformers")
    path = fetched("smollm2", catalog.SMOLLM2)
    theirs = transformers.AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name
    )
    ours = data.gguf_tokenizer(smollm2 | {"tokenizer.ggml.pre": "gpt-2"})
    for text in [*TEXTS, "<|im_start|>system\nBe short.<|im_end|>\n"]:
        expected = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text).tolist() == expected


@pytest.mark.slow
def test_minilm_json_equals_its_vocabulary_file():
    read = data.load_tokenizer(fetched("minilm", "tokenizer.json"))
    words = data.load_tokenizer(fetched("minilm", "vocab.txt"))
    assert len(read) == len(words) == 30522
    assert read.vocabulary == words.pieces
    text = "The birds' naïve Größe, 漢字 and unbelievable 1,299.50 €! " * 40
    # Longer than the 128 tokens to which the file would cut it.
    assert len(words.encode(text)) > 500
    np.testing.assert_array_equal(read.encode(text), words.encode(text))
    assert tokenizer.package() is tokenizers
