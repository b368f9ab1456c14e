"""Averages with a few neighbours in place of all: rings, push-sum, random pairs.

"Can Decentralized Algorithms Outperform Centralized Algorithms?", Lian et al., NeurIPS
2017 (D-PSGD); "Asynchronous Decentralized Parallel Stochastic Gradient Descent", Lian
et al., ICML 2018 (AD-PSGD); "Stochastic Gradient Push", Assran et al., ICML 2019.
"""

import threading

import numpy as np

from hpcjax.core import checks
from hpcjax.hostcomm.agent import Agent, Work
from hpcjax.hostcomm.collectives import barrier
from hpcjax.hostcomm.mailbox import Request, Tag
from hpcjax.hostcomm.transport import Transport


def ring_neighbours(rank: int, ranks: int) -> list[int]:
    """Returns the ranks to the left and to the right; of two ranks there is one.

    Examples:
      >>> ring_neighbours(0, 5), ring_neighbours(0, 2), ring_neighbours(0, 1)
      ([1, 4], [1], [])
    """
    return sorted({(rank - 1) % ranks, (rank + 1) % ranks} - {rank})


def neighbour_mean(transport: Transport, array: np.ndarray, tag: Tag) -> np.ndarray:
    """Returns the mean of our array and those of our neighbours in a ring; all call it.

    Examples:
      >>> from hpcjax.hostcomm import connected
      >>> with connected(1)[0] as alone:
      ...     neighbour_mean(alone, np.ones(2), Tag("ring"))
      array([1., 1.])
    """
    others = ring_neighbours(transport.rank, transport.size)
    total = sent = np.array(array)  # who has called may change theirs before it is sent
    for other in others:
        transport.isend(other, tag, sent)
    for other in others:
        total = total + transport.receive(other, tag)
    return total / np.asarray(1 + len(others), total.dtype)


def exponential_offsets(ranks: int, step: int, neighbours: int = 2) -> list[int]:
    """Returns to which ranks, counted from the own one, values are pushed in a step.

    Of 1, 2, 4, ... below P so many follow each other from step to step.

    Examples:
      >>> [exponential_offsets(16, step) for step in range(3)]
      [[1, 2], [4, 8], [1, 2]]
      >>> exponential_offsets(2, 0)
      [1]
    """
    powers = [1 << j for j in range((ranks - 1).bit_length())]
    count = min(neighbours, len(powers))
    return [powers[(step * neighbours + j) % len(powers)] for j in range(count)]


class PushSum:
    """Sums that are pushed on, with weights that say how much of them has arrived.

    In every step a rank keeps a share of its values and of its weight and sends as
    much to each out-neighbour; what it gets is added. Values over weight is the
    estimate of the mean. Nothing is lost or doubled: the sum of all weights, messages
    on their way included, is P.

    Attributes:
      sent: weight that was sent until now.
      received: weight that has arrived until now.

    Examples:
      >>> from hpcjax.hostcomm import connected
      >>> with connected(1)[0] as alone:
      ...     PushSum(alone).push(0, np.ones(2, np.float32), 1.0)
      (array([1., 1.], dtype=float32), 1.0)
    """

    def __init__(
        self, transport: Transport, *, neighbours: int = 2, overlap: int = 0
    ) -> None:
        """All ranks make theirs in the same order.

        Args:
          transport: ours.
          neighbours: to whom a rank pushes in a step.
          overlap: by how many steps a message may be late before it is waited for; 0:
            every step waits for its messages.
        """
        checks.require_count(1, neighbours=neighbours)
        checks.require_count(0, overlap=overlap)
        self.sent = self.received = 0.0
        self._transport, self._neighbours = transport, neighbours
        self._overlap, self._kind = overlap, transport.new_kind("push")
        self._coming: list[tuple[int, Request]] = []

    def push(
        self, step: int, values: np.ndarray, weight: float
    ) -> tuple[np.ndarray, float]:
        """Sends shares to the step's neighbours and adds what has come.

        Args:
          step: 0, 1, 2, ...
          values: a vector of float32.
          weight: of this rank, at first 1.

        Returns:
          Values and weight to go on with.

        Raises:
          ProcessLost: a process has ended, or stands still.
        """
        transport, tag = self._transport, Tag(self._kind, step)
        offsets = exponential_offsets(transport.size, step, self._neighbours)
        parts = len(offsets) + 1
        share = values / np.float32(parts)
        # Weights in double precision, as two words of the message: they must not leak.
        words = np.array([weight / parts]).view(np.float32)
        message = np.concatenate([share, words])
        for offset in offsets:
            to = (transport.rank + offset) % transport.size
            transport.isend(to, tag, message)
            source = (transport.rank - offset) % transport.size
            self._coming.append((step, transport.irecv(source, tag)))
        self.sent += len(offsets) * (weight / parts)
        return self._take(share, weight / parts, step - self._overlap)

    def finish(self, values: np.ndarray, weight: float) -> tuple[np.ndarray, float]:
        """Waits for all ranks and adds what was still on its way.

        Returns:
          Values and weight at the end.

        Raises:
          ProcessLost: a process has ended, or stands still.
        """
        last = max((step for step, _ in self._coming), default=0)
        made = self._take(values, weight, last)
        barrier(self._transport, tag=Tag(f"{self._kind} end"))
        return made

    def _take(
        self, values: np.ndarray, weight: float, until: int
    ) -> tuple[np.ndarray, float]:
        """Adds what has come, and waits for that of the steps up to one."""
        values, later = values.copy(), []
        for step, request in self._coming:
            if step > until and not request.test():
                later.append((step, request))
                continue
            got = request.wait()
            if got is None:
                raise AssertionError("a request for an array has one")
            came = float(got[-2:].view(np.float64)[0])
            values += got[:-2]
            weight += came
            self.received += came
        self._coming = later
        return values, weight


class PairAverages:
    """A model that is averaged with those of random others, behind its worker's back.

    Even ranks ask, odd ones answer, so that nobody waits in a circle. Both of a pair
    move to the mean of what they had then; what their workers add meanwhile stays, and
    the sum of all models is kept.

    Attributes:
      added: how often something was added.

    Examples:
      >>> from hpcjax.hostcomm import connected
      >>> with connected(1)[0] as alone:
      ...     pairs = PairAverages(alone, np.zeros(2, np.float32))
      ...     pairs.add(np.ones(2, np.float32)).tolist(), pairs.finish().tolist()
      ([1.0, 1.0], [1.0, 1.0])
    """

    def __init__(
        self,
        transport: Transport,
        model: np.ndarray,
        seed: int = 0,
        *,
        first: int = 0,
    ) -> None:
        """Starts the thread; all ranks make theirs in the same order.

        Args:
          transport: ours.
          model: at the start; it is copied.
          seed: of who is asked.
          first: how often something was added before; each has draws of its own.
        """
        self._transport, self._model = transport, model.copy()
        self._lock, self._agent = threading.Lock(), Agent("pairs")
        kind = transport.new_kind("pairs")
        self._ask, self._answer, self._end = (
            f"{kind} {what}" for what in ("ask", "answer", "end")
        )
        self._last = Tag(f"{kind} last")
        bits = np.random.Philox(key=[seed, transport.rank], counter=[0, 0, 0, first])
        self._draws = np.random.Generator(bits)
        self.added = self._asked = 0
        self._asks = transport.rank % 2 == 0
        self._work: Work | None = None
        if not self._asks:
            self._work = self._agent.submit(self._serve)

    def add(self, change: np.ndarray) -> np.ndarray:
        """Adds to the model and returns it; never waits for another rank.

        An even rank asks another one to average, unless it is still waiting for one.

        Raises:
          ProcessLost: a process has ended.
        """
        with self._lock:
            self._model = made = self._model + change
        self.added += 1
        idle = self._work is None or self._work.done()
        if self._work is not None and idle:
            self._work.result()  # raises what has failed
        if self._asks and idle and self._transport.size > 1:
            self._work = self._agent.submit(self._average)
        return made

    def finish(self) -> np.ndarray:
        """Waits for all ranks; returns the model at the end.

        Raises:
          ProcessLost: a process has ended, or stands still.
        """
        if self._asks:
            self._agent.close()
            for other in range(1, self._transport.size, 2):
                self._transport.send(other, Tag(self._end), np.empty(0, np.float32))
        else:
            self._agent.close()  # once all that ask have ended
        barrier(self._transport, tag=self._last)
        return self._model

    def _average(self) -> None:
        with self._lock:
            before = self._model  # nobody changes it in place
        other = 1 + 2 * int(self._draws.integers(self._transport.size // 2))
        self._asked += 1
        self._transport.send(other, Tag(self._ask, self._asked), before)
        theirs = self._transport.receive(other, Tag(self._answer, self._asked))
        with self._lock:
            self._model = self._model + (theirs - before) / 2

    def _serve(self) -> None:
        asking = (self._transport.size + 1) // 2
        while asking:
            letter = self._transport.receive_any(self._ask, self._end)
            if letter.tag.kind == self._end:
                asking -= 1
                continue
            with self._lock:
                before = self._model
                self._model = before + (letter.array - before) / 2
            answer = Tag(self._answer, letter.tag.round)
            self._transport.send(letter.source, answer, before)
