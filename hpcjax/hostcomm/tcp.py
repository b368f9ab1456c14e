"""Ranks connected by sockets, each with each."""

import contextlib
import itertools
import math
import socket
import time
from collections.abc import Mapping

import numpy as np

from hpcjax.core import checks
from hpcjax.core.errors import ProcessLost
from hpcjax.hostcomm.channels import PATIENCE, Channel, Message
from hpcjax.hostcomm.link import Clock, Egress, Link
from hpcjax.hostcomm.mailbox import Arrived, Tag
from hpcjax.hostcomm.transport import Transport

_GOODBYE, _HERE = Message("goodbye"), Message("here")
_LOST = "lost"


class TcpTransport(Transport):
    """A transport over one connected stream socket for each other rank.

    A thread for each takes in whatever comes, so that two ranks that send to each other
    cannot block each other; whoever waits uses no CPU. A rank whose connection ends
    without a goodbye is lost: all calls, those that wait and later ones, raise
    ProcessLost naming it.

    Examples:
      >>> a, b = connected(2)
      >>> a.send(1, Tag("greeting"), np.arange(3))
      >>> b.receive(0, Tag("greeting")).tolist()
      [0, 1, 2]
      >>> a.counters().sent[1].payload
      24
      >>> a.close(linger=0.0)
      >>> b.close()
    """

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        *,
        link: Link | None = None,
        patience: float = PATIENCE,
        clock: Clock | None = None,
    ) -> None:
        """Takes over the connections.

        Args:
          rank: ours.
          connections: to all other ranks, by rank.
          link: which holds back what is sent and delays what comes; None: no more than
            the machine does.
          patience: seconds to wait for a rank of which nothing is heard, or inf.
          clock: by which the link measures.

        Raises:
          ConfigError: a rank is missing.
        """
        size = len(connections) + 1
        ranks = sorted({rank, *connections})
        checks.require(
            ranks == list(range(size)),
            "there must be a socket per other rank",
            got=ranks,
        )
        link = link or Link()
        super().__init__(rank, size, patience=patience, latency=link.latency)
        egress = None if math.isinf(link.rate) else Egress(link.rate, clock)
        for connection in connections.values():
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._channels: dict[int, Channel] = {}
        for peer, connection in sorted(connections.items()):
            self._channels[peer] = Channel(
                connection,
                f"rank {peer}",
                patience=patience,
                egress=egress,
                deliver=_Delivery(self, peer),
            )

    def _write(self, to: int, tag: Tag, array: np.ndarray) -> int:
        message = Message(tag.kind, {"at": [tag.round, tag.phase]}, {"": array})
        try:
            return self._channels[to].send(message)
        except ProcessLost as error:
            # A part of it may have been sent: nothing that follows could be read.
            self.mailbox.check(to)
            self.mailbox.lose(error)
            raise

    def _heard(self, source: int) -> float:
        # Who waits for a message of its own waits for another thread.
        return math.inf if source == self.rank else self._channels[source].heard

    def _say_goodbye(self) -> None:
        for channel in self._channels.values():
            with contextlib.suppress(ProcessLost):
                channel.send(_GOODBYE)
            channel.end_sending()

    def _leave(self, linger: float) -> None:
        end = time.monotonic() + linger
        for channel in self._channels.values():
            channel.leave(max(0.0, end - time.monotonic()))

    def _cut(self, why: str) -> None:
        self._send_at_once(Message(_LOST, {"why": why}))
        for channel in self._channels.values():
            channel.end_sending()
            channel.leave(0.0)

    def _remind(self) -> None:
        self._send_at_once(_HERE)

    def _send_at_once(self, message: Message) -> None:
        for peer, channel in self._channels.items():
            with self._outboxes[peer].idle() as idle:
                if idle:
                    channel.send_at_once(message)


class _Delivery:
    """Puts what a channel reads into the mailbox of its transport."""

    def __init__(self, transport: TcpTransport, peer: int) -> None:
        self._transport, self._peer, self._left = transport, peer, False

    def __call__(self, message: Message | str, wire: int) -> None:
        if isinstance(message, str):
            if not self._left:
                words = f"rank {self._peer} {message}"
                self._transport.mailbox.lose(ProcessLost(words))
        elif message == _GOODBYE:
            self._left = True
            self._transport.mailbox.leave(self._peer)
        elif message == _HERE:
            pass  # it was heard
        elif message.name == _LOST and "why" in message.options:
            self._transport.mailbox.lose(ProcessLost(message.options["why"]))
        else:
            tag = Tag(message.name, *message.options["at"])
            letter = Arrived(self._peer, tag, message.arrays[""])
            self._transport._took(letter, wire)


def connected(
    size: int,
    *,
    link: Link | None = None,
    patience: float = PATIENCE,
    clock: Clock | None = None,
) -> list[TcpTransport]:
    """Returns transports that are connected with each other within this process.

    For tests and small programs, with a thread for each rank: they share one Python, so
    that their times say nothing about processes.

    Args:
      size: how many.
      link: that of each.
      patience: seconds to wait for a rank of which nothing is heard.
      clock: by which the links measure.
    """
    ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for a, b in itertools.combinations(range(size), 2):
        ends[a][b], ends[b][a] = socket.socketpair()
    return [
        TcpTransport(rank, each, link=link, patience=patience, clock=clock)
        for rank, each in enumerate(ends)
    ]
