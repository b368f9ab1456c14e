"""Places for the records of the next batches, which several threads fill in order."""

import threading


class Ring:
    """Records by their positions in what a process reads, within a moving window.

    Threads claim positions in order, and put what they have read there; who makes a
    batch takes its positions once all are there. The window moves on with the batches
    that the run has got. Nothing blocks for ever once it is closed.
    """

    def __init__(self, first: int, end: int, room: int) -> None:
        """Makes an empty one.

        Args:
          first: position with which reading begins.
          end: position with which it ends.
          room: positions that may be claimed and not yet be released.
        """
        self._changed = threading.Condition()
        self._base = self._next = first
        self._end, self._room = end, room
        self._records: dict[int, bytes | Exception] = {}
        self._again: list[int] = []
        self._raised: set[int] = set()
        self._failed: Exception | None = None
        self._closed = False

    def claim(self) -> int | None:
        """Returns the next position to read, once there is room; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._again or self._free())
            if self._closed:
                return None
            if self._again:
                return self._again.pop()
            self._next += 1
            return self._next - 1

    def put(self, position: int, record: bytes | Exception) -> None:
        """Notes what was read, or why nothing was."""
        with self._changed:
            if position >= self._base:
                self._records[position] = record
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Makes whoever takes next raise an error."""
        with self._changed:
            self._failed = error
            self._changed.notify_all()

    def take(self, first: int, last: int) -> list[bytes]:
        """Waits for the positions from `first` to before `last`, which stay there.

        Raises:
          IndexError: they were released, or are behind the end.
          ValueError: it was closed.
          Exception: what was put in place of a record, which is read again if its
            position is taken again.
        """
        positions = range(first, last)
        with self._changed:
            self._ask_again(positions)
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or self._failed
                    or self._is_past(positions)
                    or all(place in self._records for place in positions)
                )
            )
            if self._is_past(positions):
                raise IndexError(
                    f"places {first} to {last - 1} are not among those to come, "
                    f"{self._base} to {self._end - 1}: begin anew with iterate(start=…)"
                )
            if self._closed:
                raise ValueError("the reader is closed")
            if self._failed is not None:
                failed, self._failed = self._failed, None
                raise failed
            return [self._take(place) for place in positions]

    def release(self, base: int) -> None:
        """Moves the window to begin at `base`."""
        with self._changed:
            for place in range(self._base, base):
                self._records.pop(place, None)
            self._raised -= set(range(self._base, base))
            self._again = [place for place in self._again if place >= base]
            self._base = max(self._base, base)
            self._next = max(self._next, base)
            self._changed.notify_all()

    def close(self) -> None:
        """Wakes all who wait: nothing more is claimed or taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _is_past(self, positions: range) -> bool:
        return positions.start < self._base or positions.stop > self._end

    def _free(self) -> bool:
        return self._next < min(self._end, self._base + self._room)

    def _take(self, place: int) -> bytes:
        record = self._records[place]
        if isinstance(record, Exception):
            self._raised.add(place)
            raise record
        return record

    def _ask_again(self, positions: range) -> None:
        """Has those read once more for which an error was raised."""
        for place in self._raised.intersection(positions):
            self._raised.remove(place)
            del self._records[place]
            self._again.append(place)
        self._changed.notify_all()
