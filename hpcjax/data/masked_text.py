"""Pairs of sentences with masked words, as BERT is pre-trained on."""

import pathlib
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from hpcjax.core.errors import DataFormatError
from hpcjax.data.source import Batch, Dataset, check_indices, split
from hpcjax.data.text import own_text, read_documents
from hpcjax.data.wordpiece import WordPiece, read_vocabulary, train_vocabulary

CHANNELS = 3
SPECIAL = 3  # [CLS] and two [SEP]
# Of the tokens to be predicted: below the first share masked, below the second kept.
MASK, KEEP = 0.8, 0.9


class Chunk(NamedTuple):
    """Consecutive sentences of one document, `first <= i < end`, for one sequence."""

    document: int
    first: int
    end: int


Document = list[Int32[np.ndarray, "..."]]


class MaskedSource:
    """Sequences [CLS] A [SEP] B [SEP] of two runs of sentences, some words masked.

    A chunk of sentences is cut at random into A and B; half the time, and where the
    chunk is one sentence, B is a run of sentences of another document. Of all tokens
    the share `mask_rate` is to be predicted: 8 of 10 of them become [MASK], 1 any
    piece, 1 stays. Every draw belongs to the number of the example: gathering it again
    gives the same bytes.

    Args:
      documents: codes of the sentences of each document, none empty, two or more.
      coder: the vocabulary.
      context: length of a sequence; what is over is cut off, shorter ones are padded.
      mask_rate: share of the tokens to be predicted, at least one.
      copies: how often each chunk is used, with draws of its own each time.
      draw_seed: chooses the draws.

    Examples:
      >>> coder = WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"])
      >>> documents = [[coder.encode("a a a")], [coder.encode("b b b")]]
      >>> source = MaskedSource(documents, coder, context=9, mask_rate=0.2)
      >>> batch = source.gather(np.array([0]))
      >>> batch["y"].tolist(), batch["order"].tolist()
      ([[2, 5, 5, 5, 3, 6, 6, 6, 3]], [1])
    """

    def __init__(
        self,
        documents: list[Document],
        coder: WordPiece,
        *,
        context: int,
        mask_rate: float = 0.15,
        copies: int = 1,
        draw_seed: int = 0,
    ) -> None:
        self.documents, self.coder = documents, coder
        self.context, self.mask_rate = context, mask_rate
        self.copies, self.draw_seed = copies, draw_seed
        self.chunks = [
            Chunk(number, first, end)
            for number, document in enumerate(documents)
            for first, end in chunks(document, context - SPECIAL)
        ]

    def __len__(self) -> int:
        return self.copies * len(self.chunks)

    def gather(self, indices: Int[np.ndarray, " batch"]) -> Batch:
        """Returns sequences and what is to be predicted of them.

        Returns:
          x int32 [batch, context, 3]: token, whether it belongs to B, whether it is
          real and not padding; y int32 [batch, context]: the tokens unmasked; scored
          float32 [batch, context]: 1 where the token is to be predicted; order int32
          [batch]: 1 where B does not follow A.
        """
        check_indices(indices, len(self))
        rows = zip(*(self._example(int(index)) for index in indices), strict=True)
        return dict(
            zip(("x", "y", "scored", "order"), map(np.stack, rows), strict=True)
        )

    def _example(self, index: int) -> tuple[np.ndarray, ...]:
        # The second word of the counter is the example's, so that none run together.
        bits = np.random.Philox(key=self.draw_seed, counter=index << 64)
        rng = np.random.Generator(bits)
        first, second, strange = self._pair(self.chunks[index % len(self.chunks)], rng)
        first, second = truncate(first, second, self.context - SPECIAL, rng)
        cut, length = len(first) + 2, len(first) + len(second) + SPECIAL
        places = np.arange(self.context)
        tokens = np.full(self.context, self.coder.pad, np.int32)
        tokens[0], tokens[[cut - 1, length - 1]] = self.coder.start, self.coder.end
        tokens[1 : cut - 1], tokens[cut : length - 1] = first, second
        words = np.delete(places[1 : length - 1], cut - 2)
        count = min(len(words), max(1, round(self.mask_rate * length)))
        chosen = rng.permutation(words)[:count]
        scored = np.zeros(self.context, np.float32)
        scored[chosen] = 1
        seen = tokens.copy()
        seen[chosen] = self._masked(tokens[chosen], rng)
        real = places < length
        x = np.stack([seen, real & (places >= cut), real], axis=1).astype(np.int32)
        return x, tokens, scored, np.array(strange, np.int32)

    def _pair(
        self, chunk: Chunk, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """Returns A, B, and whether B is of another document."""
        document, (number, first, end) = self.documents[chunk.document], chunk
        single = end - first == 1
        cut = end if single else int(rng.integers(first + 1, end))
        head = np.concatenate(document[first:cut])
        strange = bool(rng.random() < 0.5) or single
        if not strange:
            return head, np.concatenate(document[cut:end]), False
        other = int(rng.integers(len(self.documents) - 1))
        sentences = self.documents[other + (other >= number)]
        begin = int(rng.integers(len(sentences)))
        # Whole sentences, at least one: where a pair is cut must not tell its order.
        sizes = np.cumsum([len(sentence) for sentence in sentences[begin:]])
        count = 1 + int(np.searchsorted(sizes, self.context - SPECIAL - len(head)))
        return head, np.concatenate(sentences[begin : begin + count]), True

    def _masked(self, tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Returns what stands in the places of tokens that are to be predicted."""
        draw = rng.random(len(tokens))
        pieces = rng.integers(len(self.coder), size=len(tokens))
        return np.where(
            draw < MASK, self.coder.mask, np.where(draw < KEEP, tokens, pieces)
        )


def chunks(document: Document, length: int) -> list[tuple[int, int]]:
    """Returns the ends of runs of sentences, each the shortest of `length` tokens.

    The last one may have fewer.

    Examples:
      >>> chunks([np.zeros(size, np.int32) for size in (2, 3, 9, 1)], 5)
      [(0, 2), (2, 3), (3, 4)]
    """
    found, first, tokens = [], 0, 0
    for number, sentence in enumerate(document):
        tokens += len(sentence)
        if tokens >= length or number == len(document) - 1:
            found.append((first, number + 1))
            first, tokens = number + 1, 0
    return found


def truncate(
    first: np.ndarray, second: np.ndarray, most: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts the longer one, at both ends at random, until both have `most` tokens.

    As if one token at a time were taken, from the front or from the back.
    """
    half = most // 2
    size = min(len(first), max(most - half, most - len(second)))
    sizes = size, min(len(second), most - size)
    parts = []
    for tokens, size in zip((first, second), sizes, strict=True):
        front = int(rng.binomial(len(tokens) - size, 0.5))
        parts.append(tokens[front : front + size])
    return parts[0], parts[1]


def load_masked_text(
    root: pathlib.Path,
    *,
    corpus: str = "python-reference",
    context: int = 128,
    vocabulary: int = 4096,
    vocabulary_file: str | None = None,
    lowercase: bool = True,
    mask_rate: float = 0.15,
    copies: int = 5,
    validation: float = 0.1,
    draw_seed: int = 0,
) -> Dataset:
    """Reads documents, makes or reads a vocabulary, and pairs and masks sentences.

    Args:
      root: the data root.
      corpus: "python-reference", whose text differs between Python versions; "kjv"; or
        the name of a UTF-8 file `<root>/text/<name>.txt` with a sentence per line and
        blank lines between documents.
      context: length of a sequence.
      vocabulary: most pieces of a vocabulary trained on the documents trained on.
      vocabulary_file: name of a `vocab.txt` below `<root>/text` to use instead.
      lowercase: whether letters lose their case and their accents.
      mask_rate: share of the tokens to be predicted.
      copies: how often each run of sentences is used, paired and masked anew; held-out
        ones are used once.
      validation: share of the documents held out.
      draw_seed: chooses which, and the draws; it is apart from the seed of a run.

    Raises:
      ConfigError: no such corpus, a name that is no plain file name, or a vocabulary
        smaller than the alphabet.
      DataMissing: a file is not below `root`.
      DataFormatError: a file is damaged, or a part has fewer than two documents.
    """
    documents = read_documents(root, corpus)
    parts = [
        [documents[number] for number in numbers]
        for numbers in split(len(documents), validation, draw_seed)
    ]
    if vocabulary_file is None:
        texts = (sentence for document in parts[0] for sentence in document)
        pieces = train_vocabulary(texts, vocabulary, lowercase=lowercase)
    else:
        pieces = read_vocabulary(own_text(root, vocabulary_file))
    coder = WordPiece(pieces, lowercase)
    sources = [
        MaskedSource(
            _coded(part, coder, corpus, what),
            coder,
            context=context,
            mask_rate=mask_rate,
            copies=times,
            draw_seed=draw_seed,
        )
        for part, what, times in zip(
            parts, ("training", "validation"), (copies, 1), strict=True
        )
    ]
    return Dataset(sources[0], sources[1], (context, CHANNELS), len(coder), "masked")


def _coded(
    documents: list[list[str]], coder: WordPiece, corpus: str, what: str
) -> list[Document]:
    """Returns the codes of all sentences; empty ones are left out."""
    coded = [[coder.encode(sentence) for sentence in part] for part in documents]
    full = [[codes for codes in part if len(codes)] for part in coded]
    kept = [part for part in full if part]
    if len(kept) < 2:
        raise DataFormatError(
            f"corpus {corpus!r}: expected two documents or more in the {what} part, "
            f"found {len(kept)}"
        )
    return kept
