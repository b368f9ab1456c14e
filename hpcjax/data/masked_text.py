"""Pairs of sentences with masked words, on which BERT is pre-trained."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from hpcjax.core.config import AtLeast, Config, Count, FileName, Share, Size
from hpcjax.core.errors import DataFormatError
from hpcjax.core.objective import Objective
from hpcjax.data.objectives import MASKED
from hpcjax.data.source import Batch, Dataset, check_indices, split
from hpcjax.data.text import own_text, read_documents
from hpcjax.data.wordpiece import WordPiece, read_vocabulary, train_vocabulary

CHANNELS = 3
SPECIAL = 3  # [CLS] and two [SEP]
# Of the tokens to be predicted 80 % are masked and 10 % kept; the others become random
# pieces. Compared with uniform draws.
MASK, KEEP = 0.8, 0.9


class Chunk(NamedTuple):
    """Consecutive sentences of one document, `first <= i < end`, for one sequence."""

    document: int
    first: int
    end: int


Document = list[Int32[np.ndarray, "..."]]


class MaskedSource:
    """Sequences [CLS] A [SEP] B [SEP] of two runs of sentences, with masked words.

    A chunk of sentences is cut at a random place into A and B. With probability 1/2,
    and if the chunk is a single sentence, B is instead a run of sentences of another
    document. The model has to predict a share `mask_rate` of the tokens, of which 80 %
    are replaced by [MASK], 10 % by a random piece, and 10 % not at all. Draws depend on
    the example's number only, so that gathering it again returns the same bytes.

    Args:
      documents: token codes of the sentences of each document; at least two documents,
        none of them empty.
      coder: the vocabulary.
      context: length of a sequence; longer ones are truncated, shorter ones padded.
      mask_rate: share of the tokens to be predicted; at least one token is.
      copies: how often each chunk is used, each time with other draws.
      draw_seed: seed of the draws.

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
        """Returns sequences with their masked words and targets.

        Returns:
          x: int32 [batch, context, 3], the token, 1 if it belongs to B, and 1 unless it
          is padding. y: int32 [batch, context], the tokens before masking. scored:
          float32 [batch, context], 1 where the token is to be predicted. order: int32
          [batch], 1 where B does not follow A.
        """
        check_indices(indices, len(self))
        rows = zip(*(self._example(int(index)) for index in indices), strict=True)
        return dict(
            zip(("x", "y", "scored", "order"), map(np.stack, rows), strict=True)
        )

    def _example(self, index: int) -> tuple[np.ndarray, ...]:
        # Philox's counter has four words of 64 bits. The example's number is the
        # second, so that the streams of two examples are 2⁶⁴ steps apart.
        bits = np.random.Philox(key=self.draw_seed, counter=index << 64)
        rng = np.random.Generator(bits)
        first, second, unrelated = self._pair(
            self.chunks[index % len(self.chunks)], rng
        )
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
        seen[chosen] = self._mask(tokens[chosen], rng)
        real = places < length
        x = np.stack([seen, real & (places >= cut), real], axis=1).astype(np.int32)
        return x, tokens, scored, np.array(unrelated, np.int32)

    def _pair(
        self, chunk: Chunk, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """Returns A, B, and whether B is from another document."""
        document, (number, first, end) = self.documents[chunk.document], chunk
        single = end - first == 1
        cut = end if single else int(rng.integers(first + 1, end))
        head = np.concatenate(document[first:cut])
        unrelated = bool(rng.random() < 0.5) or single
        if not unrelated:
            return head, np.concatenate(document[cut:end]), False
        # Uniform over the other documents: numbers from this one's on are shifted by
        # one.
        other = int(rng.integers(len(self.documents) - 1))
        sentences = self.documents[other + (other >= number)]
        begin = int(rng.integers(len(sentences)))
        # B ends with a sentence, as it does where it follows A; otherwise a B that is
        # cut off would tell the model that it is unrelated.
        sizes = np.cumsum([len(sentence) for sentence in sentences[begin:]])
        count = 1 + int(np.searchsorted(sizes, self.context - SPECIAL - len(head)))
        return head, np.concatenate(sentences[begin : begin + count]), True

    def _mask(self, tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Returns the tokens that the model sees in place of those to be predicted."""
        draw = rng.random(len(tokens))
        pieces = rng.integers(len(self.coder), size=len(tokens))
        return np.where(
            draw < MASK, self.coder.mask, np.where(draw < KEEP, tokens, pieces)
        )


def chunks(document: Document, length: int) -> list[tuple[int, int]]:
    """Cuts a document into runs of sentences of at least `length` tokens.

    Each run is as short as possible; the last may have fewer tokens. Returns the
    (first, end) sentence numbers of each.

    Examples:
      >>> chunks([np.zeros(size, np.int32) for size in (2, 3, 9, 1)], 5)
      [(0, 2), (2, 3), (3, 4)]
    """
    runs, first, tokens = [], 0, 0
    for number, sentence in enumerate(document):
        tokens += len(sentence)
        if tokens >= length or number == len(document) - 1:
            runs.append((first, number + 1))
            first, tokens = number + 1, 0
    return runs


def truncate(
    first: np.ndarray, second: np.ndarray, most: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Shortens the longer of two sequences until both together have `most` tokens.

    Tokens are removed from the front or the back at random, one at a time. How many of
    n removed tokens are from the front is thus binomial(n, 1/2).
    """
    # Sizes after removing from the longer one, one token at a time, to a total of
    # `most`.
    half = most // 2
    size = min(len(first), max(most - half, most - len(second)))
    sizes = size, min(len(second), most - size)
    parts = []
    for tokens, size in zip((first, second), sizes, strict=True):
        front = int(rng.binomial(len(tokens) - size, 0.5))
        parts.append(tokens[front : front + size])
    return parts[0], parts[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedTextConfig(Config):
    """Pairs of sentences with masked words, in sequences of `context` WordPiece tokens.

    Attributes:
      corpus: as in `CharTextConfig`; a file has a sentence per line and blank lines
        between documents.
      context: length of a sequence.
      vocabulary: largest size of the vocabulary, which is made of the training part.
      vocabulary_file: name of a `vocab.txt` below `<root>/text` to use instead.
      lowercase: whether text is put in lower case and accents are removed.
      mask_rate: share of the tokens to be predicted.
      copies: how often each run of sentences is used, paired and masked anew;
        held-out ones are used once.
      validation: share of the documents held out.
      draw_seed: chooses the held-out documents, pairs and masks; it is not the seed of
        the run.
    """

    objective: ClassVar[Objective] = MASKED
    smoke: ClassVar[Mapping[str, str]] = {"context": "16", "vocabulary": "60"}

    corpus: FileName = "python-reference"
    context: Annotated[int, AtLeast(5)] = 128
    vocabulary: Size = 4096
    vocabulary_file: FileName | None = None
    lowercase: bool = True
    mask_rate: Share = 0.15
    copies: Size = 5
    validation: Share = 0.1
    draw_seed: Count = 0

    def load(self, root: pathlib.Path) -> Dataset:
        """Reads documents and a vocabulary, or makes one, and returns masked pairs.

        Raises:
          ConfigError: no such corpus, or a vocabulary smaller than the alphabet.
          DataMissing: a file is not below `root`.
          DataFormatError: a file is damaged, or a part has fewer than two documents.
        """
        documents = read_documents(root, self.corpus)
        parts = [
            [documents[number] for number in numbers]
            for numbers in split(len(documents), self.validation, self.draw_seed)
        ]
        if self.vocabulary_file is None:
            texts = (sentence for document in parts[0] for sentence in document)
            pieces = train_vocabulary(texts, self.vocabulary, lowercase=self.lowercase)
        else:
            pieces = read_vocabulary(own_text(root, self.vocabulary_file))
        coder = WordPiece(pieces, self.lowercase)
        sources = [
            MaskedSource(
                _encode_documents(part, coder, self.corpus, what),
                coder,
                context=self.context,
                mask_rate=self.mask_rate,
                copies=times,
                draw_seed=self.draw_seed,
            )
            for part, what, times in zip(
                parts, ("training", "validation"), (self.copies, 1), strict=True
            )
        ]
        inputs = (self.context, CHANNELS)
        return Dataset(sources[0], sources[1], inputs, len(coder), MASKED)


def _encode_documents(
    documents: list[list[str]], coder: WordPiece, corpus: str, what: str
) -> list[Document]:
    """Returns the codes of all sentences, without empty sentences and documents."""
    coded = [[coder.encode(sentence) for sentence in part] for part in documents]
    full = [[codes for codes in part if len(codes)] for part in coded]
    kept = [part for part in full if part]
    if len(kept) < 2:
        raise DataFormatError(
            f"corpus {corpus!r}: expected two documents or more in the {what} part, "
            f"found {len(kept)}"
        )
    return kept
