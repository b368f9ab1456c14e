"""Corpora against what was written, and token windows against their documents."""

import gzip
import hashlib
import json
import pathlib
import sysconfig

import numpy as np
import pytest

from hpcjax import data
from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing
from hpcjax.data import corpora, token_text, wordnet
from hpcjax.data.corpora import read_c4, read_ptb, read_wikitext
from hpcjax.data.token_cache import encode_documents
from hpcjax.data.tokenizer import byte_pair_tokenizer
from hpcjax.runs import directory
from tests.data import writers

ROOT = directory.data_root(pathlib.Path(__file__).parents[2])


def by_rule(name):
    rest = int.from_bytes(hashlib.sha1(name.encode()).digest()) % 100
    return ("validation", "test", "train")[(rest >= 5) + (rest >= 10)]


@pytest.mark.parametrize(
    "corpus", ["kjv", "python-reference", "python-library", "kernel-docs", "wordnet"]
)
def test_documents_are_held_out_by_the_hash_of_their_names(tiny_root, corpus):
    named = corpora.read_documents(tiny_root, corpus)
    for part in ("train", "validation", "test"):
        expected = [text for name, text in named.items() if by_rule(name) == part]
        assert data.read_part(tiny_root, corpus, part) == expected
    shares = [by_rule(f"document {number}") for number in range(20_000)]
    for part, share in (("train", 0.9), ("validation", 0.05), ("test", 0.05)):
        # Four deviations of a binomial share.
        assert abs(shares.count(part) - 20_000 * share) < 4 * np.sqrt(20_000 * 0.05)
        assert data.part_of("document 7") == shares[7]


def test_documents_and_their_names(tiny_root):
    kjv = corpora.read_documents(tiny_root, "kjv")
    assert list(kjv)[:2] == ["Genesis 1", "Genesis 2"]
    first = [writers.sentences(400, number) for number in (0, 1)]
    assert kjv["Genesis 1"] == "\n".join(first) + "\n"
    docs = corpora.read_documents(tiny_root, "kernel-docs")
    assert len(docs) == 64
    assert docs["admin-guide/003.rst"].startswith("Größe 3\n=====\n")
    own = corpora.read_documents(tiny_root, "documents.txt")
    assert list(own)[1] == "documents.txt:1"
    assert own["documents.txt:1"].split("\n")[0] == writers.sentences(60, 6).strip()


def test_the_standard_library_is_read_whole_and_without_tests(tiny_root):
    found = corpora.read_documents(tiny_root, "python-library")
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    assert found["json/decoder.py"] == (library / "json" / "decoder.py").read_text()
    assert list(found) == sorted(found)
    assert len(found) > 500
    parts = {part for name in found for part in name.split("/")}
    assert parts.isdisjoint({"test", "tests", "idle_test", "site-packages"})
    assert {"abc.py", "asyncio", "xml"} <= parts


def test_a_library_that_is_no_source_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(DataMissing, match=r"not in .* as files"):
        corpora.read_documents(tmp_path, "python-library")
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\n'\xe4'\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "bad.py").write_bytes(b"\xe4")
    assert corpora.read_documents(tmp_path, "python-library") == {
        "latin.py": "# coding: latin-1\n'ä'\n"
    }
    (tmp_path / "bad.py").write_bytes(b"'\xe4'")
    with pytest.raises(DataFormatError, match=r"bad\.py: no source"):
        corpora.read_documents(tmp_path, "python-library")


def test_wikitext_is_joined_as_its_perplexity_is_measured(tmp_path):
    path = tmp_path / "wiki.test.raw"
    path.write_bytes(" \n = Größe = \n \n A\u2028b\x0cc .\n".encode())
    # Each line with its end, a blank one empty, two newlines between.
    expected = "\n\n = Größe = \n\n\n\n\n A\u2028b\x0cc .\n"
    assert read_wikitext(path) == expected
    path.write_text("a\nb\n")
    assert read_wikitext(path) == "a\n\n\nb\n"
    path.write_text("a\nb")
    with pytest.raises(DataFormatError, match="character 3: expected the end of a"):
        read_wikitext(path)


def test_sentences_of_the_penn_treebank(tmp_path):
    path = tmp_path / "ptb.valid.txt"
    path.write_text(" no it was n't black monday \n but <unk> N \n")
    assert read_ptb(path) == ["no it was n't black monday", "but <unk> N"]


def test_published_parts_are_kept(tiny_root):
    words = {
        part: writers.sentences(100, 1000 * seed)
        for seed, part in enumerate(("train", "validation", "test"))
    }
    for part, sentence in words.items():
        (article,) = data.read_part(tiny_root, "wikitext-2", part)
        assert article.startswith(f"\n\n = {sentence[:9]} = \n")
        (sentences,) = data.read_part(tiny_root, "ptb", part)
        assert sentences.startswith(sentence.strip())
        assert sentences.count("\n\n") == 63
    pages = data.read_part(tiny_root, "c4", "train")
    assert [pages[0], pages[64]] == [
        writers.sentences(200, number) for number in (0, 100)
    ]
    assert len(data.read_part(tiny_root, "c4", "validation")) == 64
    with pytest.raises(ConfigError, match="c4 has no part 'test'"):
        data.read_part(tiny_root, "c4", "test")


def test_c4_is_read_as_far_as_asked(tmp_path):
    path = tmp_path / "c4-train.00000-of-01024.json.gz"
    lines = [json.dumps({"text": f"Größe {n}\u2028", "url": "u"}) for n in range(9)]
    packed = gzip.compress("\n".join([*lines, "no json"]).encode())
    path.write_bytes(packed)
    assert read_c4(path, 2) == ["Größe 0\u2028", "Größe 1\u2028"]
    with pytest.raises(DataFormatError, match=r"gz: line 10: .*found 'no json'"):
        read_c4(path)
    plain = tmp_path / "c4.json"
    plain.write_text("\n".join(lines))
    assert len(read_c4(plain)) == 9


def refused(tmp_path, content, words):
    path = tmp_path / "c4.json.gz"
    path.write_bytes(content)
    with pytest.raises(DataFormatError, match=words):
        read_c4(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"text": 3}\n', "line 1: expected 'text' to be a str"),
        (b'{"text": "a\\ud800"}\n', "line 1: 'text': character 1: .*D800"),
        (b"[3]\n", r"line 1: expected a JSON object, found '\[3\]'"),
        (b'{"text": "a"}\n\n', "line 2: expected a JSON object"),
        (b'{"text": "\xff"}\n', "line 1: expected UTF-8, found 0xff"),
    ],
)
def test_bad_records_are_refused(tmp_path, content, words):
    refused(tmp_path, gzip.compress(content), words)


def test_damaged_files_are_refused(tmp_path):
    # Their bytes hold the time: as parameters they would name other tests elsewhere.
    refused(tmp_path, gzip.compress(b'{"text": "a"}\n' * 99)[:-9], "damaged after line")
    refused(tmp_path, b"no gzip", "damaged after line 0")


def test_files_that_are_not_there_or_no_files(tmp_path):
    with pytest.raises(DataMissing, match=r"none\.json"):
        read_c4(tmp_path / "none.json")
    with pytest.raises(DataFormatError, match="expected a regular file"):
        read_ptb(tmp_path)


@pytest.mark.parametrize(
    ("corpus", "words"),
    [
        ("wikitext", "corpus must be one of .*did you mean 'wikitext-2'"),
        ("../x.txt", "corpus may hold only"),
    ],
)
def test_corpora_that_cannot_be(tmp_path, corpus, words):
    with pytest.raises(ConfigError, match=words):
        data.read_part(tmp_path, corpus)


def test_wordnet_lines(tmp_path):
    writers.write_wordnet(tmp_path)
    path = tmp_path / "wordnet" / "data.adj"
    line = (
        "00002312 00 a 02 able-bodied 0 set_on(ip) 4 002 ;c 06037666 n 0000 ! 00002527"
        ' a 0101 | away; from | it; "an \'x\' (y)"; "b"  \n'
    )
    path.write_text(writers.WORDNET_HEAD + line)
    (found,) = data.read_wordnet(tmp_path, "adj")
    assert found[:2] == ("adj:00002312", ("able-bodied", "set on"))
    assert found.gloss == 'away; from | it; "an \'x\' (y)"; "b"'
    assert found.definition == "away; from | it"
    assert len(wordnet.read_all(tmp_path)) == 301
    # The number of words is hexadecimal.
    many = " ".join(f"word{number} 0" for number in range(17))
    path.write_text(f"00000001 00 a 11 {many} 000 | so many\n")
    (full,) = data.read_wordnet(tmp_path, "adj")
    assert full.words == tuple(f"word{number}" for number in range(17))
    for bad in ("00002312 00 a 02 able 0 | x\n", "x\n", line.replace(" | ", " ")):
        path.write_text(writers.WORDNET_HEAD + bad)
        with pytest.raises(
            DataFormatError, match=r"data\.adj: line 2: expected offset"
        ):
            data.read_wordnet(tmp_path, "adj")


def test_windows():
    tokens = np.arange(100, 123, dtype=np.int32)
    found = data.windows(tokens, 5)
    np.testing.assert_array_equal(found, np.arange(100, 120).reshape(4, 5))
    assert data.windows(tokens, 23).shape == (1, 23)
    drawn = data.random_windows(tokens, 4000, 20, seed=1)
    assert drawn.shape == (4000, 20)
    assert drawn.dtype == np.int32
    np.testing.assert_array_equal(
        drawn - drawn[:, :1], np.tile(np.arange(20), (4000, 1))
    )
    # Each of the four beginnings a quarter of the time, within five deviations.
    counts = np.unique_counts(drawn[:, 0])
    assert counts.values.tolist() == [100, 101, 102, 103]
    assert max(abs(counts.counts - 1000)) < 5 * np.sqrt(4000 * 3 / 16)
    np.testing.assert_array_equal(drawn, data.random_windows(tokens, 4000, 20, seed=1))
    assert (drawn != data.random_windows(tokens, 4000, 20, seed=2)).any()
    assert data.random_windows(tokens, 3, 23, seed=0)[:, 0].tolist() == [100] * 3
    for cut in (data.windows, lambda t, size: data.random_windows(t, 1, size, seed=0)):
        with pytest.raises(DataFormatError, match="size=24 tokens, found 23"):
            cut(tokens, 24)
        with pytest.raises(ConfigError, match="size must be at least 1: got size=0"):
            cut(tokens, 0)


def test_token_windows_are_the_documents_in_a_row(tmp_path):
    writers.write_kernel_docs(tmp_path)
    writers.write_kjv(tmp_path, 200)
    settings = data.TokenTextConfig(
        corpora=("kjv", "kernel-docs"), context=16, vocabulary=280
    )
    read = settings.load(tmp_path)
    (kept,) = (tmp_path / "tokenizers").iterdir()
    coder = data.load_tokenizer(kept, eos="<|endoftext|>")
    for part, source in (("train", read.train), ("validation", read.validation)):
        every = source.gather(np.arange(len(source)))
        tokens = np.append(every["x"].ravel(), every["y"][-1, -1])
        np.testing.assert_array_equal(every["y"].ravel(), tokens[1:])
        documents = [
            document
            for corpus in settings.corpora
            for document in data.read_part(tmp_path, corpus, part)
        ]
        whole = "<|endoftext|>".join([*documents, ""])
        assert whole.startswith(coder.decode(tokens))
        # Less than a window is lost at the end.
        lost = whole.removeprefix(coder.decode(tokens))
        assert len(coder.encode(lost)) < 16
    assert read.outputs == len(coder) == 280
    assert read.objective.name == "language"


def test_a_vocabulary_is_made_once_of_what_is_trained_on(tmp_path, monkeypatch):
    writers.write_kernel_docs(tmp_path)
    made = []
    train = token_text.train_byte_pairs

    def counted(documents, size):
        made.append(list(documents))
        return train(made[-1], size)

    monkeypatch.setattr(token_text, "train_byte_pairs", counted)
    settings = {"corpora": ("kernel-docs",), "context": 16, "vocabulary": 280}
    first = data.TokenTextConfig(**settings).load(tmp_path)
    again = data.TokenTextConfig(**settings | {"context": 9}).load(tmp_path)
    np.testing.assert_array_equal(first.train.codes, again.train.codes)
    assert made == [data.read_part(tmp_path, "kernel-docs", "train")]
    data.TokenTextConfig(**settings | {"vocabulary": 290}).load(tmp_path)
    fewer = data.TokenTextConfig(**settings, limit=10).load(tmp_path)
    assert len(made) == 3
    assert len(made[-1]) == 10
    assert (fewer.train.codes == 0).sum() == 10
    held_out = len(data.read_part(tmp_path, "kernel-docs", "validation"))
    assert (fewer.validation.codes == 0).sum() == held_out
    assert len(list((tmp_path / "tokenizers").iterdir())) == 3
    prints = {
        token_text.fingerprint(documents, size)
        for documents, size in (
            (["ab", "c"], 280),
            (["a", "bc"], 280),
            (["ab", "c"], 281),
        )
    }
    assert len(prints) == 3


def test_a_kept_vocabulary_that_is_damaged_is_named(tmp_path):
    writers.write_kernel_docs(tmp_path)
    settings = data.TokenTextConfig(
        corpora=("kernel-docs",), context=16, vocabulary=280
    )
    settings.load(tmp_path)
    (kept,) = (tmp_path / "tokenizers").iterdir()
    kept.write_text(kept.read_text()[:50])
    with pytest.raises(DataFormatError, match=kept.name):
        settings.load(tmp_path)


def test_parts_too_short_for_a_window_are_refused(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "own.txt").write_text("one\n\ntwo\n\nthree")
    settings = data.TokenTextConfig(corpora=("own.txt",), context=4, vocabulary=257)
    with pytest.raises(DataFormatError, match=r"part 'validation'.*found 0 in 0 doc"):
        settings.load(tmp_path)
    with pytest.raises(ConfigError, match="must have a token that ends a text"):
        encode_documents(byte_pair_tokenizer(["a"], []), ["a"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("corpus", "file", "documents", "words"),
    [
        ("kernel-docs", "documents.jsonl", 5128, "workqueue"),
        ("wordnet", "data.noun", 117_659, "domesticated"),
        ("kjv", "kjv.jsonl", 1189, "begat"),
    ],
)
def test_the_real_corpora(corpus, file, documents, words):
    if not (ROOT / corpus / file).exists():
        pytest.skip(f"{corpus} is not here: hpcjax data fetch {corpus}")
    parts = corpora.read_parts(ROOT, corpus, *corpora.PARTS)
    assert sum(map(len, parts)) == documents
    for part in parts:
        assert 0.03 * documents < len(part) < 0.92 * documents
        assert any(words in document for document in part)
