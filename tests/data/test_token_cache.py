"""Tokens that are kept on the disk: once computed, whole or not there, never stale."""

import mmap

import numpy as np
import pytest

from hpcjax import data
from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.data import token_cache
from hpcjax.data.token_cache import encode_documents
from hpcjax.data.tokenizer import END

DOCUMENTS = [f"document {number}, {'word ' * (number % 5)}" for number in range(600)]


@pytest.fixture(scope="module")
def coder():
    return data.train_byte_pairs(DOCUMENTS[:50], 270)


def files_of(root):
    return sorted((root / "tokens").iterdir())


def test_tokens_are_those_of_the_documents_and_stay_on_the_disk(tmp_path, coder):
    tokens = data.cached_tokens(tmp_path, coder, DOCUMENTS)
    np.testing.assert_array_equal(tokens, encode_documents(coder, DOCUMENTS))
    assert isinstance(tokens.base, mmap.mmap)
    (kept,) = files_of(tmp_path)
    # A file as numpy writes it, which other programs read.
    np.testing.assert_array_equal(np.load(kept), tokens)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_what_is_kept_is_not_computed_again(tmp_path, coder, monkeypatch):
    first = data.cached_tokens(tmp_path, coder, DOCUMENTS)

    def refuse(*_):
        raise AssertionError("encoded again")

    monkeypatch.setattr(token_cache, "encode_documents", refuse)
    again = data.cached_tokens(tmp_path, coder, DOCUMENTS)
    np.testing.assert_array_equal(first, again)


def test_another_text_or_tokenizer_is_another_file(tmp_path, coder):
    other = data.train_byte_pairs(DOCUMENTS[:50], 265)
    for given, documents in (
        (coder, ["ab", "c"]),
        (coder, ["a", "bc"]),
        (coder, ["ab", "c", ""]),
        (other, ["ab", "c"]),
    ):
        tokens = data.cached_tokens(tmp_path, given, documents)
        np.testing.assert_array_equal(tokens, encode_documents(given, documents))
    assert len(files_of(tmp_path)) == 4


def test_an_interrupted_write_leaves_nothing(tmp_path, coder, monkeypatch):
    encode, calls = token_cache.encode_documents, []

    def stop_at_the_second(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return encode(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(token_cache, "encode_documents", stop_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            data.cached_tokens(tmp_path, coder, DOCUMENTS)
    assert not files_of(tmp_path)
    # The documents are encoded a few at a time.
    assert [len(documents) for _, documents in calls] == [256, 256]
    tokens = data.cached_tokens(tmp_path, coder, DOCUMENTS)
    np.testing.assert_array_equal(tokens, encode(coder, DOCUMENTS))


def test_a_damaged_file_is_named(tmp_path, coder):
    data.cached_tokens(tmp_path, coder, DOCUMENTS)
    (kept,) = files_of(tmp_path)
    whole = kept.read_bytes()
    kept.unlink()
    for content in (b"", whole[:50], whole[:-4], b"x" * len(whole)):
        kept.write_bytes(content)
        with pytest.raises(DataFormatError, match=rf"{kept.name}: .*delete it"):
            data.cached_tokens(tmp_path, coder, DOCUMENTS)
    np.save(kept, np.ones((2, 2)))
    with pytest.raises(DataFormatError, match=r"float64 \[2, 2\]; delete it"):
        data.cached_tokens(tmp_path, coder, DOCUMENTS)


def test_no_documents_and_no_end_of_a_text(tmp_path, coder):
    assert data.cached_tokens(tmp_path, coder, []).shape == (0,)
    endless = data.Tokenizer(coder.inner)
    with pytest.raises(ConfigError, match="must have a token that ends a text"):
        data.cached_tokens(tmp_path, endless, ["a"])
    assert data.Tokenizer(coder.inner, eos=END).eos == coder.eos


def test_a_resumed_run_goes_on_with_the_next_batch(tmp_path, monkeypatch):
    """The second load reads what the first has kept, and batches are by position."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "own.txt").write_text("\n\n".join(DOCUMENTS))
    config = data.TokenTextConfig(corpora=("own.txt",), context=8, vocabulary=265)
    stream = data.batches(config.load(tmp_path).train, 12, seed=3)
    with stream.iterate() as iterator:
        batches = [next(iterator) for _ in range(4)]
        state = iterator.get_state()
        following = next(iterator)
    again = data.batches(config.load(tmp_path).train, 12, seed=3)
    with again.iterate() as iterator:
        iterator.set_state(state)
        found = next(iterator)
    for key, value in following.items():
        np.testing.assert_array_equal(found[key], value)
        np.testing.assert_array_equal(again[2][key], batches[2][key])
        # A batch is an array of its own, not a view of the file.
        assert type(value) is np.ndarray
