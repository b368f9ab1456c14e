"""Tokenizers: from `tokenizer.json` or `vocab.txt`, from GGUF, or trained on texts.

All but `vocab.txt` need the package `tokenizers`.
"""

import importlib
import itertools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Int32

from hpcjax.core import files
from hpcjax.core.errors import (
    ConfigError,
    DataFormatError,
    DataMissing,
    UnsupportedOp,
    nearest,
)
from hpcjax.data.records import field
from hpcjax.data.source import check_indices
from hpcjax.data.text import check_characters, read_utf8
from hpcjax.data.wordpiece import WordPiece, read_vocabulary

END = "<|endoftext|>"
_BATCH = 256
# GGUF's types of tokens that do not result from merges: control and user defined.
_SPECIAL = (3, 4)
_WORDS = ("gpt-2", "smollm", "llama-bpe")
# What a word of LLaMA 3 is: the first of these that a text goes on with.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@runtime_checkable
class Coder(Protocol):
    """Anything that encodes text and decodes tokens: `Tokenizer` and `WordPiece`."""

    def __len__(self) -> int:
        """Returns the size of the vocabulary."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Returns the codes of a text, int32 [tokens]."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text of codes."""
        ...


class Tokenizer:
    """A tokenizer of the package `tokenizers` with numpy arrays as codes.

    It adds no special tokens to a text and neither truncates nor pads it, whatever its
    file says. A special token that is written out in a text becomes its code.

    Args:
      inner: a `tokenizers.Tokenizer`, whose truncation and padding are switched off.
      bos: the token that begins a text, or its code; None if there is none.
      eos: the token that ends a text, or its code; None if there is none.

    Attributes:
      vocabulary: the token of each code; "" where a code has none.
      bos: code of the first token of a text, or None.
      eos: code of the last, or None.

    Raises:
      ConfigError: `bos` or `eos` is not in the vocabulary.
    """

    def __init__(
        self,
        inner: Any,
        *,
        bos: str | int | None = None,
        eos: str | int | None = None,
    ) -> None:
        inner.no_truncation()
        inner.no_padding()
        self.inner = inner
        codes = inner.get_vocab(with_added_tokens=True)
        self.vocabulary = [""] * (1 + max(codes.values(), default=-1))
        for token, code in codes.items():
            self.vocabulary[code] = token
        known = codes | {code: code for code in codes.values()}
        for token in (bos, eos):
            if token is not None and token not in known:
                raise ConfigError(
                    f"the vocabulary has no token {token!r}{nearest(str(token), codes)}"
                )
        self.bos = None if bos is None else known[bos]
        self.eos = None if eos is None else known[eos]

    def __len__(self) -> int:
        return len(self.vocabulary)

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """Returns the codes of a text.

        Raises:
          DataFormatError: a lone surrogate, which is half a character of UTF-16.
        """
        return self.encode_all([text])[0]

    def encode_all(self, texts: Iterable[str]) -> list[Int32[np.ndarray, "..."]]:
        """Returns the codes of each text; several cores share the work.

        Raises:
          DataFormatError: a lone surrogate, which is half a character of UTF-16.
        """
        numbered, codes = enumerate(texts), []
        # In batches, since the package's results are many times as large as the codes.
        while batch := list(itertools.islice(numbered, _BATCH)):
            for number, text in batch:
                check_characters(text, f"text {number}")
            encoded = self.inner.encode_batch_fast(
                [text for _, text in batch], add_special_tokens=False
            )
            codes += (np.array(each.ids, np.int32) for each in encoded)
        return codes

    def save(self, path: pathlib.Path) -> None:
        """Writes `tokenizer.json`, completely or not at all."""
        files.write_atomic(path, self.inner.to_str())

    def decode(
        self, tokens: Int[np.ndarray, " tokens"], *, special: bool = True
    ) -> str:
        """Returns the text of codes; bytes that are no UTF-8 become U+FFFD.

        Args:
          tokens: codes.
          special: whether special tokens are written too.

        Raises:
          IndexError: a code outside the vocabulary.
        """
        check_indices(tokens, len(self))
        return self.inner.decode(tokens.tolist(), skip_special_tokens=not special)


def load_tokenizer(
    path: pathlib.Path, *, bos: str | int | None = None, eos: str | int | None = None
) -> Tokenizer | WordPiece:
    """Reads a `tokenizer.json`, or a `vocab.txt` of WordPiece in lower case.

    Args:
      path: the file; one that ends in ".txt" is a vocabulary of WordPiece.
      bos: the token that begins a text, or its code, which a `tokenizer.json` does not
        tell.
      eos: the token that ends a text, or its code, likewise.

    Raises:
      DataMissing: no such file.
      DataFormatError: it is damaged.
      ConfigError: `bos` or `eos` is not in it, or `tokenizers` is not installed.
    """
    if path.suffix != ".txt":
        return read_tokenizer(path, bos=bos, eos=eos)
    if not path.exists():
        raise DataMissing(f"no file {path}")
    return WordPiece(read_vocabulary(path))


def read_tokenizer(
    path: pathlib.Path, *, bos: str | int | None = None, eos: str | int | None = None
) -> Tokenizer:
    """Reads a `tokenizer.json`; see `load_tokenizer`."""
    if not path.exists():
        raise DataMissing(f"no file {path}")
    parts, content = package(), read_utf8(path)
    try:
        inner = parts.Tokenizer.from_str(content)
    except Exception as error:  # the package raises nothing more exact
        raise DataFormatError(
            f"{path}: expected a tokenizer of the package tokenizers: {error}"
        ) from error
    return Tokenizer(inner, bos=bos, eos=eos)


def byte_pair_tokenizer(
    tokens: Sequence[str],
    merges: Sequence[str],
    *,
    pre: str = "gpt-2",
    types: Sequence[int] | np.ndarray = (),
    bos: int | None = None,
    eos: int | None = None,
    unknown: int | None = None,
) -> Tokenizer:
    """Returns a byte-level byte-pair tokenizer with a given vocabulary and merges.

    Text is split into words, punctuation and white space. The UTF-8 bytes of each are
    written as printable characters, and the first merge in `merges` that applies is
    applied until none does.

    Args:
      tokens: the token of each code, with bytes written as GPT-2 does.
      merges: pairs "left right", in order of priority.
      pre: how text is split: "gpt-2"; "smollm", which makes each digit a word; or
        "llama-bpe", LLaMA 3's, where a word that is a token is never merged.
      types: GGUF's type of each token. Those of type 3 (control) and 4 (user defined)
        are special and never part of a word. Empty if no token is special.
      bos: code of the token that begins a text.
      eos: code of the token that ends a text.
      unknown: code for bytes without a token; None leaves such bytes out, as
        transformers and llama.cpp do.

    Raises:
      UnsupportedOp: no such `pre`.
      DataFormatError: a token occurs twice, a merge is not of two tokens or does not
        make one, or a code is outside the vocabulary.
      ConfigError: `tokenizers` is not installed.

    References:
      Radford et al.: Language Models are Unsupervised Multitask Learners, 2019, 2.2.

    Examples:
      >>> tokens = ["a", "b", "ab", "</s>"]
      >>> coder = byte_pair_tokenizer(tokens, ["a b"], types=[1, 1, 1, 3])
      >>> coder.encode("aab</s>b").tolist()
      [0, 2, 3, 1]
      >>> codes = np.array([2, 3, 0])
      >>> coder.decode(codes), coder.decode(codes, special=False)
      ('ab</s>a', 'aba')
    """
    if pre not in _WORDS:
        raise UnsupportedOp(f"no splitting {pre!r}{nearest(pre, _WORDS)}")
    codes = _codes(tokens)
    named = {"bos": bos, "eos": eos, "unknown": unknown}
    for name, code in named.items():
        if code is not None and not 0 <= code < len(tokens):
            raise DataFormatError(
                f"{name} must be a code of the {len(tokens)} tokens: got {code}"
            )
    if np.shape(types) not in ((0,), (len(tokens),)):
        raise DataFormatError(
            f"expected a type for each of {len(tokens)} tokens, found {np.size(types)}"
        )
    bos_name, eos_name, unknown_name = (
        None if code is None else tokens[code] for code in named.values()
    )
    parts, llama = package(), pre == "llama-bpe"
    model = parts.models.BPE(
        codes, _merges(merges, codes), unk_token=unknown_name, ignore_merges=llama
    )
    inner, make = parts.Tokenizer(model), parts.pre_tokenizers
    words = [make.ByteLevel(add_prefix_space=False, use_regex=not llama)]
    if llama:
        words.insert(0, make.Split(parts.Regex(_LLAMA3), "isolated"))
    if pre == "smollm":
        words.insert(0, make.Digits(individual_digits=True))
    inner.pre_tokenizer, inner.decoder = (
        make.Sequence(words),
        parts.decoders.ByteLevel(),
    )
    special = [
        parts.AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in _SPECIAL
    ]
    inner.add_special_tokens(special)
    return Tokenizer(inner, bos=bos_name, eos=eos_name)


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Returns the tokenizer that the metadata of a GGUF file describes.

    Args:
      metadata: values by key, as GGUF readers return them; "tokenizer.ggml.tokens",
        "merges", "token_type", "pre", "bos_token_id" and "eos_token_id" are used.

    Raises:
      UnsupportedOp: it is not a byte-pair tokenizer, or splits text in an unknown way.
      DataFormatError: tokens or merges are absent, do not fit together, or a value is
        of another type.
      ConfigError: `tokenizers` is not installed.
    """
    prefix = "tokenizer.ggml."
    model = metadata.get(prefix + "model")
    if model != "gpt2":
        raise UnsupportedOp(f"{prefix}model must be 'gpt2': got {model!r}")
    metadata = {prefix + "pre": "gpt-2", **metadata}
    codes = {
        name: field(metadata, f"{prefix}{name}_token_id", int, "metadata")
        for name in ("bos", "eos")
        if f"{prefix}{name}_token_id" in metadata
    }
    return byte_pair_tokenizer(
        _strings(metadata, prefix + "tokens"),
        _strings(metadata, prefix + "merges"),
        pre=field(metadata, prefix + "pre", str, "metadata"),
        types=np.asarray(metadata.get(prefix + "token_type", ()), object),
        bos=codes.get("bos"),
        eos=codes.get("eos"),
    )


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = field(metadata, key, list, "metadata")
    if not all(isinstance(value, str) for value in values):
        raise DataFormatError(
            f"metadata: expected {key!r} to be strings, found {values!r:.60}"
        )
    return values


def train_byte_pairs(texts: Iterable[str], size: int) -> Tokenizer:
    """Trains a byte-level byte-pair tokenizer, whose token 0 ends a text.

    The vocabulary is `END`, the 256 bytes, and merges of the most frequent pairs, until
    it is full or no pair occurs twice. Any text can be encoded, and is decoded exactly.

    Args:
      texts: the training texts.
      size: largest size of the vocabulary.

    Raises:
      ConfigError: `size` does not hold `END` and the bytes, or `tokenizers` is not
        installed.
    """
    least = 257
    if size < least:
        raise ConfigError(
            f"vocabulary must be at least {least}, the bytes and {END}: got {size}"
        )
    parts = package()
    inner = parts.Tokenizer(parts.models.BPE())
    inner.pre_tokenizer = parts.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = parts.decoders.ByteLevel()
    trainer = parts.trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[END],
        # Sorted, since the package returns the alphabet in the order of a hash table.
        initial_alphabet=sorted(parts.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return Tokenizer(inner, eos=END)


def package() -> Any:
    """Returns the package `tokenizers`.

    Raises:
      ConfigError: it is not installed; the message has the command.
    """
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise ConfigError(
            f"tokenizers is needed: pip install 'hpcjax[text]' ({error})"
        ) from error


def _codes(tokens: Sequence[str]) -> dict[str, int]:
    """Returns `{token: code}`; raises DataFormatError if a token occurs twice."""
    codes: dict[str, int] = {}
    for code, token in enumerate(tokens):
        if codes.setdefault(token, code) != code:
            raise DataFormatError(
                f"token {code}: expected one that is not there yet, found {token!r}"
            )
    return codes


def _merges(merges: Sequence[str], codes: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns merges as pairs of tokens, after checking them."""
    pairs = []
    for number, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= codes.keys():
            raise DataFormatError(
                f"merge {number}: expected two tokens that make a third, found "
                f"{merge!r}"
            )
        pairs.append((left, right))
    return pairs
