"""The event simulation of readers: threads, links that are shared, and what is kept."""

import collections
import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from hpcjax.data.access import AccessStream
from hpcjax.data.placement import Plan, StorageClass

if TYPE_CHECKING:
    from hpcjax.cost.input_time import InputSystem

SOURCES = ("storage", "neighbours", "memory")
Done = Callable[[], None]


class Policy(NamedTuple):
    """What a reader does.

    Attributes:
      threads: that stage records, of each worker.
      window: records that may be staged and not yet be trained on.
      overlap: whether staging goes on while a batch is trained on.
      keeps_first: whether a worker keeps what it reads when nobody else has it.
      plan: of what is kept; None: nothing.
      neighbours: whether the memory of others is asked.
    """

    threads: int
    window: int
    overlap: bool = True
    keeps_first: bool = False
    plan: Plan | None = None
    neighbours: bool = True


def simulate(
    policy: Policy,
    stream: AccessStream,
    sizes: Int[np.ndarray, " examples"],
    system: "InputSystem",
) -> tuple[Float[np.ndarray, " batches"], dict[str, float]]:
    """Returns when each batch was trained on, and the bytes from each source."""
    clock, received = _Clock(), dict.fromkeys(SOURCES, 0.0)
    into, out = (
        [clock.link(lambda _, rate=rate: rate) for _ in range(stream.workers)]
        for rate in (system.network_rate, system.send_rate)
    )
    shared = _Shared(
        policy,
        stream,
        sizes,
        system,
        clock,
        clock.link(system.storage),
        into,
        out,
        _Shelves(policy, stream.workers, sizes, system.classes),
        received,
    )
    workers = [_Worker(rank, shared) for rank in range(stream.workers)]
    ends = []

    def train(number: int) -> None:
        """Begins batch `number` in each worker; all meet at its end."""
        running = set(workers)

        def ended(worker: "_Worker") -> None:
            running.remove(worker)
            if not running:
                ends.append(clock.now)
                if number + 1 < len(stream.order):
                    train(number + 1)

        for worker in workers:
            worker.wait_for(number, ended)

    for worker in workers:
        worker.work()
    train(0)
    clock.run()
    return np.array(ends), received


class _Clock:
    """Events in order of time, and links, whose events move as their load changes."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Done]] = []
        self._order = itertools.count()
        self._links: list[_Link] = []

    def after(self, seconds: float, done: Done) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), done))

    def link(self, rate: Callable[[int], float]) -> "_Link":
        self._links.append(_Link(self, rate))
        return self._links[-1]

    def run(self) -> None:
        while True:
            nearest = min(self._links, key=_Link.due)
            due = self._events[0][0] if self._events else np.inf
            if due == nearest.due() == np.inf:
                return
            if due <= nearest.due():
                self.now, _, done = heapq.heappop(self._events)
            else:
                self.now = nearest.due()
                done = nearest.pop()
            done()


class _Link:
    """A bandwidth that all who use it have equal parts of.

    `passed` are the bytes that each of them has got since the beginning. One that comes
    at `passed` p and wants s bytes has got them at p + s, however many come and go.
    """

    def __init__(self, clock: _Clock, rate: Callable[[int], float]) -> None:
        self._clock, self._rate, self._since, self._passed = clock, rate, 0.0, 0.0
        self._jobs: list[tuple[float, int, Done, int]] = []
        self._order = itertools.count()
        self._users: collections.Counter[int] = collections.Counter()

    def send(self, count: float, user: int, done: Done) -> None:
        self._go_on()
        job = (self._passed + count, next(self._order), done, user)
        heapq.heappush(self._jobs, job)
        self._users[user] += 1

    def due(self) -> float:
        """Returns when the first of its jobs ends."""
        if not self._jobs:
            return np.inf
        left = self._jobs[0][0] - self._passed
        return self._since + left / self._speed()

    def pop(self) -> Done:
        self._go_on()
        self._passed, _, done, user = heapq.heappop(self._jobs)
        self._users[user] -= 1
        self._users += collections.Counter()  # forgets those that have none
        return done

    def _go_on(self) -> None:
        if self._jobs and self._clock.now > self._since:
            self._passed += (self._clock.now - self._since) * self._speed()
        self._since = self._clock.now

    def _speed(self) -> float:
        return self._rate(len(self._users)) / len(self._jobs)


class _Shelves:
    """What all workers keep: by plan, or what each has read first."""

    def __init__(
        self,
        policy: Policy,
        workers: int,
        sizes: Int[np.ndarray, " examples"],
        classes: Sequence[StorageClass],
    ) -> None:
        # The class of each record that a worker keeps.
        self.kept: list[dict[int, int]] = [{} for _ in range(workers)]
        self.first: dict[int, int] = {}  # who has read it first
        self._sizes, self._classes = sizes, classes
        self._room = [[each.bytes for each in classes] for _ in range(workers)]
        self.by_first, plan = policy.keeps_first, policy.plan
        self.planned = plan
        ranks = range(workers)
        self.own = [None if plan is None else plan.storage_of(w) for w in ranks]
        self.near = [None if plan is None else plan.nearest(w) for w in ranks]
        self.asks = policy.neighbours
        self.progress = [[0] * len(held) for held in plan.held] if plan else []

    def keep(self, worker: int, record: int) -> None:
        own = self.own[worker]
        if own is not None and own[record] >= 0:
            self.kept[worker][record] = int(own[record])
        elif self.by_first and record not in self.first:
            self._keep_first(worker, record)

    def _keep_first(self, worker: int, record: int) -> None:
        room, size = self._room[worker], self._sizes[record]
        for number in range(len(room)):
            if room[number] >= size:
                room[number] -= size
                self.kept[worker][record] = number
                self.first[record] = worker
                return

    def ask(self, worker: int, record: int) -> int | None:
        """Returns who sends a record to a worker; None if nobody can."""
        if self.by_first:
            return self.first.get(record)
        near = self.near[worker]
        if near is None or not self.asks or near.worker[record] < 0:
            return None
        number, other = int(near.storage[record]), int(near.worker[record])
        likely = near.place[record] < self._reach(worker, number)
        return other if likely and record in self.kept[other] else None

    def rate_of(self, worker: int, record: int) -> float:
        """Returns the rate at which a thread reads what a worker keeps."""
        held = self._classes[self.kept[worker][record]]
        return held.read_rate / held.threads

    def _reach(self, worker: int, number: int) -> float:
        """Returns how far a worker has come in what it fetches for a class."""
        assert self.planned is not None
        order, reach = self.planned.held[worker][number], self.progress[worker]
        while reach[number] < len(order):
            if int(order[reach[number]]) not in self.kept[worker]:
                return reach[number]
            reach[number] += 1
        return np.inf


class _Shared(NamedTuple):
    """What all workers have in common."""

    policy: Policy
    stream: AccessStream
    sizes: Int[np.ndarray, " examples"]
    system: "InputSystem"
    clock: _Clock
    storage: _Link
    into: list[_Link]
    out: list[_Link]
    shelves: _Shelves
    received: dict[str, float]


class _Worker:
    """Threads of one worker, what they stage, and what is trained on."""

    def __init__(self, rank: int, shared: _Shared) -> None:
        self._rank = rank
        self._policy, self._sizes = shared.policy, shared.sizes
        self._system, self._shelves = shared.system, shared.shelves
        self._clock, self._storage = shared.clock, shared.storage
        self._received, stream = shared.received, shared.stream
        plan = self._policy.plan
        self._into, self._out = shared.into[rank], shared.out
        self._reads, self._rows = stream.worker(rank).tolist(), stream.rows
        self._next = self._base = self._urgent = 0
        self._idle = self._policy.threads
        self._staged = collections.Counter[int]()
        self._coming: dict[int, list[Done]] = {}
        self._waiting: tuple[int, Callable[[_Worker], None]] | None = None
        self._joins = plan is not None or self._policy.keeps_first
        held = () if plan is None else plan.held[rank]
        self._orders = [collections.deque(records.tolist()) for records in held]
        self._fillers = [each.threads for each in self._system.classes[: len(held)]]

    def work(self) -> None:
        """Gives all threads that are idle something to do, if there is anything."""
        end = min(len(self._reads), self._base + self._policy.window)
        while self._idle and self._next < end:
            self._idle -= 1
            place, self._next = self._next, self._next + 1
            self._get(self._reads[place], lambda p=place: self._preprocess(p), 1)
        for number, order in enumerate(self._orders):
            while order and self._fillers[number] and not self._urgent:
                record = order.popleft()
                kept = record in self._shelves.kept[self._rank]
                if not kept and record not in self._coming:
                    self._fillers[number] -= 1
                    self._get(record, lambda n=number: self._filled(n), 0)

    def wait_for(self, number: int, ended: Callable[["_Worker"], None]) -> None:
        """Trains on a batch as soon as it is there."""
        self._waiting = number, ended
        self._begin()

    def _begin(self) -> None:
        if self._waiting is None or self._staged[self._waiting[0]] < self._rows:
            return
        (number, ended), self._waiting = self._waiting, None
        places = slice(number * self._rows, (number + 1) * self._rows)
        count = self._sizes[self._reads[places]].sum()

        def end() -> None:
            self._base = places.stop
            self.work()
            ended(self)

        self._clock.after(count / self._system.consume_rate, end)
        if self._policy.overlap:
            self._base = places.stop
            self.work()

    def _preprocess(self, place: int) -> None:
        size = self._sizes[self._reads[place]]
        self._clock.after(
            size / self._system.preprocess_rate, lambda: self._publish(place)
        )

    def _publish(self, place: int) -> None:
        self._staged[place // self._rows] += 1
        self._idle += 1
        self.work()
        self._begin()

    def _filled(self, number: int) -> None:
        self._fillers[number] += 1
        self.work()

    def _get(self, record: int, done: Done, urgent: int) -> None:
        """Fetches a record from the nearest place, and calls `done`."""
        size, shelves = self._sizes[record], self._shelves
        if record in shelves.kept[self._rank]:
            self._received["memory"] += size
            rate = shelves.rate_of(self._rank, record)
            self._clock.after(size / rate, done)
        elif record in self._coming and self._joins:
            self._received["memory"] += size
            self._coming[record].append(done)
        elif (other := shelves.ask(self._rank, record)) is not None:
            self._coming.setdefault(record, []).append(done)
            self._received["neighbours"] += size
            # It goes no faster than the other one reads it, nor than it is let out.
            least = size / shelves.rate_of(other, record)
            all_of = _All(3, lambda: self._arrive(record, 0))
            self._clock.after(least, all_of.one)
            self._out[other].send(size, self._rank, all_of.one)
            self._into.send(size, other, all_of.one)
        else:
            self._coming.setdefault(record, []).append(done)
            self._received["storage"] += size
            self._urgent += urgent
            self._clock.after(
                self._system.latency,
                lambda: self._storage.send(
                    size, self._rank, lambda: self._arrive(record, urgent)
                ),
            )

    def _arrive(self, record: int, urgent: int) -> None:
        self._urgent -= urgent
        self._shelves.keep(self._rank, record)
        waiting = self._coming.pop(record)
        # Who keeps nothing has asked for each by itself.
        now, later = (waiting, []) if self._joins else (waiting[:1], waiting[1:])
        if later:
            self._coming[record] = later
        for done in now:
            done()
        self.work()


class _All:
    """Calls something once it was called so many times itself."""

    def __init__(self, many: int, done: Done) -> None:
        self._left, self._done = many, done

    def one(self) -> None:
        self._left -= 1
        if not self._left:
            self._done()
