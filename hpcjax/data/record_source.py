"""Examples as bytes, which can be fetched, kept and sent apart from being decoded."""

import io
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from hpcjax.core.errors import ConfigError
from hpcjax.data.source import Batch, Sampler, Source
from hpcjax.hostcomm.channels import frame, read_message
from hpcjax.hostcomm.packing import pack, unpack


@runtime_checkable
class RecordSource(Source, Protocol):
    """A source whose examples are records: `gather` is `decode` of what `read` gives.

    `read` and `decode` are called by several threads at once.
    """

    @property
    def sizes(self) -> Int[np.ndarray, " examples"]:
        """Bytes of each record, found without reading it."""
        ...

    def read(self, index: int) -> bytes:
        """Returns a record, as it is in its storage.

        Raises:
          DataFormatError: it is not there, or not whole; names it.
        """
        ...

    def decode(self, records: list[bytes], indices: np.ndarray) -> Batch:
        """Returns the batch of some records, whose numbers are `indices`.

        Raises:
          DataFormatError: a record is damaged; names it.
        """
        ...


def as_records(source: Source | Sampler) -> RecordSource:
    """Returns the source itself, or one whose records are its framed arrays.

    A framed record is a header and the bytes of one row's arrays, see
    `hostcomm.channels.frame`. Nothing is pickled.

    Raises:
      ConfigError: a sampler, whose batches are not made of numbered examples.
    """
    if isinstance(source, RecordSource):
        return source
    if isinstance(source, Sampler):
        raise ConfigError(
            f"{type(source).__name__} draws its batches itself, so that nobody can say "
            "what will be read: take input=read_ahead"
        )
    return FramedSource(source)


class FramedSource:
    """Any source as one of records; made by `as_records`."""

    def __init__(self, source: Source) -> None:
        self.source = source
        # All rows have the same arrays, so that all records have the size of the first.
        first = len(self.read(0)) if len(source) else 0
        self.sizes = np.full(len(source), first)

    def __len__(self) -> int:
        return len(self.source)

    def gather(self, indices: Int[np.ndarray, " batch"]) -> Batch:
        """Returns what the source itself gathers."""
        return self.source.gather(indices)

    def read(self, index: int) -> bytes:
        """Returns the frame of one example's arrays."""
        row = self.source.gather(np.array([index]))
        return b"".join(frame(pack("record", row)))

    def decode(self, records: list[bytes], indices: Int[np.ndarray, " batch"]) -> Batch:
        """Returns the rows of all records in one batch; their numbers do not matter."""
        import jax  # only for trees of arrays, which have no other home

        del indices
        rows = [unpack(read_message(io.BytesIO(each).readinto)[0]) for each in records]
        return jax.tree.map(lambda *own: np.concatenate(own), *rows)
