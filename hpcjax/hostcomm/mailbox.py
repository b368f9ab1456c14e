"""What has arrived and who waits for it: matched by source and tag, in order."""

import collections
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from hpcjax.core.errors import HpcjaxError, ProcessLost


class Tag(NamedTuple):
    """What an array is about; messages of one source and tag keep their order.

    Attributes:
      kind: who uses it for what.
      round: counts what is repeated.
      phase: of a round.
    """

    kind: str
    round: int = 0
    phase: int = 0


class Arrived(NamedTuple):
    """An array, where it came from and what it is about.

    Attributes:
      source: the rank.
      tag: its tag.
      array: belongs to the receiver.
    """

    source: int
    tag: Tag
    array: np.ndarray


class Request:
    """A message on its way: what `isend` and `irecv` return.

    Attributes:
      peer: the rank at the other end; None: whoever sends first.
      owed_by: ranks of which at least one must send before it can be done.
    """

    def __init__(
        self,
        mailbox: "Mailbox",
        peer: int | None,
        tags: Sequence[Tag | str] | None,
        owed_by: Collection[int] = (),
    ) -> None:
        """Made by a transport; `tags` is None for what is sent."""
        self._mailbox, self.peer, self._tags = mailbox, peer, tags
        self.owed_by = tuple(owed_by) if peer is None else (peer,)
        self.due = math.inf  # when it is done, if that is known
        self.arrived: Arrived | None = None
        self.error: Exception | None = None

    def test(self) -> bool:
        """Says whether `wait` would return, or raise, at once."""
        return self._mailbox.ready(self)

    def wait(self, timeout: float | None = None) -> np.ndarray | None:
        """Waits until it is done.

        Args:
          timeout: seconds, after which it can be waited for again; None: the patience
            of the transport.

        Returns:
          The array that has been received; None for what was sent, whose array may be
          changed again.

        Raises:
          ProcessLost: a process has ended, or was silent for longer than the patience.
          TimeoutError: the timeout is over.
        """
        self._mailbox.wait([self], timeout)
        if self.error is not None:
            raise self.error
        return None if self.arrived is None else self.arrived.array

    def waits(self) -> bool:
        """Says whether it is for something that certain ranks have yet to send."""
        coming = self._tags is not None and self.arrived is None
        return coming and bool(self.owed_by)

    def matches(self, source: int, tag: Tag) -> bool:
        """Says whether it takes what comes from there with this tag."""
        known = not self._tags or tag in self._tags or tag.kind in self._tags
        return known and self.peer in (None, source)


class Mailbox:
    """Holds what nobody has asked for yet; wakes those who wait.

    Whoever waits does so at one condition variable and uses no CPU.
    """

    def __init__(
        self,
        *,
        patience: float,
        latency: float,
        heard: Callable[[int], float],
        remind: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes an empty one.

        Args:
          patience: seconds that one waits for a rank of which nothing is heard.
          latency: seconds from the arrival of a message until it is delivered.
          heard: when something has last come from a rank, `time.monotonic()`.
          remind: lets the others hear that we are here; called after half the patience,
            so that who waits for us does not give up before we do.
        """
        self.changed = threading.Condition()
        self._patience, self._latency = patience, latency
        self._heard, self._remind = heard, remind
        self._letters: collections.deque[tuple[float, Arrived]] = collections.deque()
        self._posted: list[Request] = []
        self._over: HpcjaxError | None = None
        self._gone: dict[int, str] = {}

    def deliver(self, letter: Arrived, *, local: bool = False) -> None:
        """Takes something in; gives it to who has asked first."""
        due = time.monotonic() + (0.0 if local else self._latency)
        with self.changed:
            if not self._give(due, letter):
                self._letters.append((due, letter))

    def ask(
        self,
        source: int | None,
        tags: Sequence[Tag | str],
        owed_by: Collection[int] = (),
    ) -> Request:
        """Asks for the first message from a rank, or any, with one of the tags.

        A text among `tags` stands for all tags of that kind; no tag, for all. From any,
        it is waited for as long as one of those by whom it is owed is heard; if there
        are none, for ever.
        """
        request = Request(self, source, tags, owed_by)
        with self.changed:
            for place, (due, letter) in enumerate(self._letters):
                if request.matches(letter.source, letter.tag):
                    del self._letters[place]
                    request.due, request.arrived = due, letter
                    break
            else:
                self._posted.append(request)
        return request

    def withdraw(self, request: Request) -> None:
        """Asks no longer; what had come for it is there for others."""
        with self.changed:
            if request in self._posted:
                self._posted.remove(request)
            elif (letter := request.arrived) and not self._give(request.due, letter):
                self._letters.appendleft((request.due, letter))

    def done(self, request: Request, error: Exception | None = None) -> None:
        """Tells who waits that something was sent, or could not be."""
        with self.changed:
            request.due, request.error = -math.inf, error
            self.changed.notify_all()

    def ready(self, request: Request) -> bool:
        """Says whether to wait for it would return, or raise, at once."""
        with self.changed:
            now = time.monotonic()
            return bool(
                self._over or request.due <= now or self._hopeless(request) is not None
            )

    def lose(self, error: HpcjaxError) -> None:
        """Makes all that wait, now or later, raise an error; the first one stays."""
        with self.changed:
            self._over = self._over or error
            self.changed.notify_all()

    def leave(self, source: int) -> None:
        """Notes that a rank has said goodbye: nothing more comes from there."""
        with self.changed:
            self._gone[source] = f"rank {source} has closed its transport"
            self.changed.notify_all()

    def check(self, peer: int | None = None) -> None:
        """Raises what `lose` was told, or ProcessLost if the peer has left."""
        with self.changed:
            self._raise_if_over()
            if peer in self._gone:
                raise ProcessLost(self._gone[peer])

    def wait(self, requests: Sequence[Request], timeout: float | None) -> int:
        """Waits until one of the requests is done and returns its place.

        Raises:
          ProcessLost: a process has ended, or all those waited for have left or were
            silent for longer than the patience.
          TimeoutError: the timeout, in seconds, is over.
        """
        begin = time.monotonic()
        end = math.inf if timeout is None else begin + timeout
        half = begin + self._patience / 2
        with self.changed:
            while True:
                self._raise_if_over()
                now = time.monotonic()
                for place, request in enumerate(requests):
                    if request.due <= now:
                        return place
                hopeless = [self._hopeless(each) for each in requests]
                if None not in hopeless:
                    raise ProcessLost("; ".join(dict.fromkeys(map(str, hopeless))))
                if now >= end:
                    raise TimeoutError(f"nothing has come for {timeout:g} s")
                silent = max(self._silent(request, begin) for request in requests)
                if now >= silent:
                    self._give_up(requests)
                reminder = half if silent < math.inf else math.inf
                if now >= reminder:
                    half = math.inf
                    self.changed.release()
                    try:
                        self._remind()
                    finally:
                        self.changed.acquire()
                    continue
                dues = [each.due for each in requests]
                next_one = min(end, silent, reminder, *dues)
                left = next_one - now
                self.changed.wait(None if math.isinf(left) else left)

    def _give(self, due: float, letter: Arrived) -> bool:
        """Gives it to who has asked first; says whether there was anybody."""
        for request in self._posted:
            if request.matches(letter.source, letter.tag):
                self._posted.remove(request)
                request.due, request.arrived = due, letter
                self.changed.notify_all()
                return True
        return False

    def _raise_if_over(self) -> None:
        if self._over is not None:
            raise type(self._over)(str(self._over))

    def _hopeless(self, request: Request) -> str | None:
        if not request.waits() or not self._gone.keys() >= set(request.owed_by):
            return None
        return "; ".join(self._gone[rank] for rank in request.owed_by)

    def _silent(self, request: Request, begin: float) -> float:
        """Returns when the patience for a request ends, if nothing is heard."""
        if not request.waits():
            return math.inf
        return max(begin, *map(self._heard, request.owed_by)) + self._patience

    def _give_up(self, requests: Sequence[Request]) -> None:
        peers = sorted({rank for each in requests for rank in each.owed_by})
        who = ", ".join(f"rank {peer}" for peer in peers)
        many = "have" if len(peers) > 1 else "has"
        self.lose(ProcessLost(f"{who} {many} sent nothing for {self._patience:g} s"))
        self._raise_if_over()
