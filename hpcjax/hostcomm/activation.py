"""Rounds that need not wait for everybody: whoever may start one wakes all agents.

A round is some exchange between ranks. The agent of a rank, a thread, runs the rounds
strictly in order and takes part in each as soon as it is started anywhere, whether its
own worker has arrived or not. What is exchanged is up to the function that it is given.
"""

import collections
import threading
from collections.abc import Callable, Collection, Sequence

import numpy as np

from hpcjax.core import checks
from hpcjax.hostcomm.mailbox import Arrived, Tag
from hpcjax.hostcomm.transport import Transport

_NOTHING = np.empty(0, np.uint8)
_NOBODY = -1  # the root of an activation that is not passed on


def tree_children(rank: int, root: int, size: int) -> list[int]:
    """Returns to whom a rank passes an activation on, the largest subtree first.

    Rank v, counted from the root, passes it on to v + 2^j for all 2^j > v (binomial
    tree): every rank is reached once, after at most ceil(log2 P) messages in a row.

    Args:
      rank: who passes on.
      root: who has started the round.
      size: P.

    Examples:
      >>> [tree_children(rank, 0, 6) for rank in range(6)]
      [[1, 2, 4], [3, 5], [], [], [], []]
    """
    place = (rank - root) % size
    steps = (1 << j for j in range(place.bit_length(), (size - 1).bit_length()))
    return [(place + step + root) % size for step in steps if place + step < size]


def initiators(seed: int, size: int, rounds: int) -> np.ndarray:
    """Returns the rank that starts each round, the same in every process.

    More rounds begin with the same ranks.

    Args:
      seed: of the draws.
      size: the number of ranks.
      rounds: how many.

    Examples:
      >>> initiators(0, 8, 5).tolist() == initiators(0, 8, 100)[:5].tolist()
      True
    """
    return np.random.Generator(np.random.Philox(seed)).integers(size, size=rounds)


class RoundAgent:
    """Runs rounds 0, 1, 2, ... in a thread, each as soon as somebody may start it.

    A round begins here once
      - a rank whose worker may start it has sent its activation, or
      - a message of the round itself has come from another rank, or
      - our own worker has arrived and may start it: then we send the activation.
    Activations carry the number of their round; a number is acted on once, so that
    several ranks may start a round at once. A round that waits for its owner begins
    only when our own worker has arrived; the last one always does.

    Attributes:
      done: the last round that has ended, at first -1.
      arrived: the last round at which our worker has arrived, at first -1.
    """

    def __init__(
        self,
        transport: Transport,
        run: Callable[[int, bool], None],
        *,
        kind: str,
        frames: Callable[[int], Sequence[Tag]],
        starter: Callable[[int], int | None] = lambda _: None,
        quorum: int = 1,
        waits: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Starts the thread, which does not keep the process alive.

        Args:
          transport: ours.
          run: called by the thread as `run(number, last)`: takes what the worker has
            posted, exchanges it and publishes what has come of it.
          kind: begins the kinds of its messages, which nobody else may use.
          frames: the tags of the messages that show that a round has begun elsewhere:
            all that `run` may receive in a round that does not wait for its owner.
          starter: the rank whose worker's arrival starts a round; None: anybody's does.
            It is lost, as in all waiting for a rank, if nothing is heard of it.
          quorum: if more than one, so many arrivals start a round, whoever's they are:
            all are reported to rank 0, which counts them.
          waits: says, when all rounds before it have ended, whether a round begins here
            only once our worker has arrived.
        """
        checks.require(
            1 <= quorum <= transport.size,
            f"quorum must be in 1..{transport.size}",
            quorum=quorum,
        )
        self.changed = threading.Condition()
        self.done = self.arrived = -1
        self._transport, self._run, self._frames = transport, run, frames
        self._starter, self._quorum, self._waits = starter, quorum, waits
        self._kinds = tuple(f"{kind} {what}" for what in ("here", "report", "start"))
        self._arrive, self._report, self._activate = self._kinds
        self._here = -1  # what the thread knows of `arrived`
        self._activated = -1  # the newest round that was started, as far as is known
        # Of rounds that have not ended: who has arrived.
        self._reports: collections.defaultdict[int, set[int]]
        self._reports = collections.defaultdict(set)
        self._last: int | None = None
        self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=kind, daemon=True)
        self._thread.start()

    def check_next(self, number: int) -> None:
        """Raises ConfigError unless our worker may arrive at a round now.

        It arrives at every round, in order, once the one before has ended.
        """
        self._raise_if_failed()
        checks.require(self._last is None, "this agent has ended", number=number)
        newest = self.arrived
        in_order = number == newest + 1
        checks.require(in_order, f"round {newest + 1} is next", number=number)
        waited = f"round {newest} must be waited for first"
        checks.require(self.done >= newest, waited, number=number)

    def arrive(self) -> None:
        """Says that our worker has arrived at its next round; returns at once.

        Raises:
          ProcessLost: a process has ended.
        """
        self.arrived += 1
        self._tell(self._transport.rank, self._arrive)
        # The last round starts nobody who has not arrived there.
        if self._quorum > 1 and self._last is None and self.arrived > self.done:
            self._tell(0, self._report)

    def wait(self, number: int, timeout: float | None = None) -> None:
        """Returns once a round has ended.

        Args:
          number: of the round.
          timeout: seconds; None: as long as it takes.

        Raises:
          ProcessLost: a process has ended, or stands still.
          TimeoutError: the timeout is over.
          Exception: what `run` has raised.
        """
        with self.changed:
            self.changed.wait_for(
                lambda: self.done >= number or self._error is not None, timeout
            )
            if self.done < number:
                self._raise_if_failed()
                raise TimeoutError(f"round {number} has not ended within {timeout:g} s")

    def finish(self, timeout: float | None = None) -> int:
        """Arrives at the last round, waits for it and ends; returns its number.

        All workers call it after the same number of rounds.

        Raises:
          ProcessLost: a process has ended, or stands still.
          TimeoutError: the timeout is over; it may be called again.
          Exception: what `run` has raised.
        """
        if self._last is None:
            self.check_next(self.arrived + 1)
            self._last = self.arrived + 1
            self.arrive()
        checks.require(not self._ended, "this agent has ended", round=self._last)
        self.wait(self._last, timeout)
        self._thread.join()
        self._ended = True
        return self._last

    def _tell(self, to: int, kind: str) -> None:
        self._transport.send(to, Tag(kind, self.arrived), _NOTHING)

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            while self._last is None or self.done < self._last:
                number = self.done + 1
                if self._waits(number):
                    self._wait_for_owner(number)
                else:
                    self._wait_for_start(number)
                self._run(number, number == self._last)
                self._reports.pop(number, None)
                with self.changed:
                    self.done = number
                    self.changed.notify_all()
        except BaseException as error:  # raised by who waits
            with self.changed:
                self._error = error
                self.changed.notify_all()

    def _wait_for_owner(self, number: int) -> None:
        while self._here < number:
            self._take(self._transport.receive_any(*self._kinds))

    def _wait_for_start(self, number: int) -> None:
        while self._activated < number:
            if self._here == self._last == number:
                return
            if self._starts(number):
                self._pass_on(number, self._transport.rank)
            else:
                self._hear(number)
        self._wake_folded(number)

    def _starts(self, number: int) -> bool:
        if self._quorum > 1:
            return len(self._reports[number]) >= self._quorum
        mine = self._starter(number) in (None, self._transport.rank)
        return mine and self._here >= number

    def _owed_by(self, number: int) -> Collection[int]:
        """Returns without whom a round cannot begin that our worker waits for."""
        if self._here < number:
            return ()
        if self._quorum > 1 and self._transport.rank == 0:
            return set(range(self._transport.size)) - self._reports[number]
        starter = 0 if self._quorum > 1 else self._starter(number)
        return () if starter is None else (starter,)

    def _hear(self, number: int) -> None:
        """Takes the next letter, or notices a message of the round itself."""
        mailbox, owed_by = self._transport.mailbox, self._owed_by(number)
        tags = self._frames(number)
        control = mailbox.ask(None, self._kinds, owed_by)
        frames = [mailbox.ask(None, tags, owed_by)] if tags else []
        first = self._transport.wait_any([control, *frames])
        for request in frames:
            mailbox.withdraw(request)  # what has come is for `run`
        if first == 1:
            mailbox.withdraw(control)
            self._activated = number
        elif control.arrived is not None:
            self._take(control.arrived)

    def _take(self, letter: Arrived) -> None:
        kind, number = letter.tag.kind, letter.tag.round
        if kind == self._arrive:
            self._here = number
        elif kind == self._report:
            if number > self.done:
                self._reports[number].add(letter.source)
        elif number > max(self._activated, self.done):
            self._pass_on(number, int(letter.array))

    def _pass_on(self, number: int, root: int) -> None:
        """Sends an activation to our children in the tree of who has started it."""
        self._activated = number
        if root != _NOBODY:
            tag, transport = Tag(self._activate, number), self._transport
            for child in tree_children(transport.rank, root, transport.size):
                transport.send(child, tag, np.array(root, np.int32))

    def _wake_folded(self, number: int) -> None:
        """Wakes the rank that is folded onto ours, if P is not a power of two.

        It gets no message of the round before its end. Where two trees meet each can
        lose a branch, and then nothing else would reach it.
        """
        transport = self._transport
        folded = transport.rank + (1 << (transport.size.bit_length() - 1))
        if folded < transport.size:
            array = np.array(_NOBODY, np.int32)
            transport.send(folded, Tag(self._activate, number), array)
