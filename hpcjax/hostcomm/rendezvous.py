"""How ranks find each other: over listening sockets, on one machine or many."""

import contextlib
import hmac
import math
import os
import secrets
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError, ProcessLost
from hpcjax.hostcomm.channels import PATIENCE, Message, frame, read_message
from hpcjax.hostcomm.link import Link
from hpcjax.hostcomm.tcp import TcpTransport

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HELLO, _WELCOME = "hello", "welcome"
_POLL = 0.05
_FIRST_WORDS = 5.0  # seconds for who has called to say who it is
_MOST_PORTS = 2**16
Address = tuple[str, int]


def listen(
    host: str = "127.0.0.1", port: int = 0, *, backlog: int = 64
) -> socket.socket:
    """Returns a socket that listens; port 0 is a free one.

    Examples:
      >>> with listen() as listener:
      ...     listener.getsockname()[0]
      '127.0.0.1'
    """
    return socket.create_server((host, port), backlog=backlog)


def meet(
    rank: int,
    listener: socket.socket,
    addresses: Sequence[Address],
    token: str,
    *,
    patience: float = PATIENCE,
    known: Mapping[int, socket.socket] | None = None,
) -> dict[int, socket.socket]:
    """Connects with all others: calls the lower ranks, is called by the higher ones.

    Args:
      rank: ours.
      listener: ours; it is closed.
      addresses: those of all ranks' listeners, by rank.
      token: a secret of this run: who does not know it is not let in.
      patience: seconds in which all others must have come.
      known: connections there are already.

    Returns:
      A connection to each other rank.

    Raises:
      ProcessLost: some have not come; says which.
    """
    made = dict(known or {})
    end = time.monotonic() + patience
    for lower in sorted(set(range(rank)) - made.keys()):
        made[lower] = call(addresses[lower], f"rank {lower}", end, retry=False)
        _say(made[lower], Message(_HELLO, {"rank": rank, "token": token}))
    with listener:
        while missing := set(range(len(addresses))) - made.keys() - {rank}:
            connection, hello = _accept(listener, end, missing, "rank")
            said = str(hello.get("token")).encode(errors="replace")
            right = hmac.compare_digest(said, token.encode())
            if right and hello.get("rank") in missing:
                made[hello["rank"]] = connection
            else:
                connection.close()
    return made


def connect(
    *,
    link: Link | None = None,
    patience: float = PATIENCE,
    environment: Mapping[str, str] = os.environ,
) -> TcpTransport:
    """Connects processes of several machines, as the environment says.

    `RANK` is that of this process, `WORLD_SIZE` how many there are; rank 0 listens on
    `MASTER_PORT` of its machine, which the others reach as `MASTER_ADDR`, and tells all
    where the others are. The network must be trusted: whoever speaks to rank 0 first is
    taken for the rank it says it is.

    Args:
      link: which holds back what is sent; None: no more than the network does.
      patience: seconds in which all must have come, and to wait for a silent rank.
      environment: another one than this process's.

    Raises:
      ConfigError: a variable is missing or no such number.
      ProcessLost: some have not come.

    Examples:
      >>> alone = dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="", MASTER_PORT="1")
      >>> with connect(environment=alone) as transport:
      ...     transport.size
      1
    """
    rank, size, host, port = _read(environment)
    if size == 1:
        return TcpTransport(0, {}, link=link, patience=patience)
    with contextlib.ExitStack() as stack:
        if rank == 0:
            listener = stack.enter_context(listen("", port, backlog=size))
            connections = _gather(listener, size, patience)
        else:
            connections = _join(rank, size, (host, port), patience)
    return TcpTransport(rank, connections, link=link, patience=patience)


def call(address: Address, who: str, end: float, *, retry: bool) -> socket.socket:
    """Returns a connection to a listener.

    Args:
      address: its host and port.
      who: listens there, for errors.
      end: when to give up, `time.monotonic()`.
      retry: it may not be there yet.

    Raises:
      ProcessLost: nobody is there.
    """
    while True:
        try:
            return socket.create_connection(address, _left(end))
        except OSError as error:
            if not retry or time.monotonic() >= end:
                place = "{}:{}".format(*address)
                raise ProcessLost(f"{who} is not there, at {place}: {error}") from error
        time.sleep(_POLL)


def _gather(
    listener: socket.socket, size: int, patience: float
) -> dict[int, socket.socket]:
    """Rank 0: waits for all, then tells each where the others listen."""
    end = time.monotonic() + patience
    made: dict[int, socket.socket] = {}
    places: dict[int, Address] = {0: ("", 0)}  # which nobody calls again
    while missing := set(range(1, size)) - made.keys():
        connection, hello = _accept(listener, end, missing, "rank", "size", "port")
        if hello.get("size") != size or hello.get("rank") not in missing:
            connection.close()
            continue
        made[hello["rank"]] = connection
        places[hello["rank"]] = connection.getpeername()[0], hello["port"]
    told = {
        "addresses": [list(places[rank]) for rank in range(size)],
        "token": secrets.token_hex(16),
    }
    for connection in made.values():
        _say(connection, Message(_WELCOME, told))
    return made


def _join(
    rank: int, size: int, master: Address, patience: float
) -> dict[int, socket.socket]:
    """Another rank: tells rank 0 where it listens, then meets the others."""
    end = time.monotonic() + patience
    first = call(master, "rank 0", end, retry=True)
    listener = listen("", backlog=size)
    port = listener.getsockname()[1]
    _say(first, Message(_HELLO, {"rank": rank, "size": size, "port": port}))
    try:
        told = _hear(first, _left(end)).options
    except Exception as error:  # other bytes may break the reading of them anywhere
        listener.close()
        first.close()
        raise ProcessLost(
            f"rank 0 has not welcomed rank {rank} of {size}; is there another with "
            f"this RANK, or another WORLD_SIZE? {error}"
        ) from error
    addresses = [(host, port) for host, port in told["addresses"]]
    known = {0: first}
    return meet(
        rank, listener, addresses, told["token"], patience=patience, known=known
    )


def _accept(
    listener: socket.socket, end: float, missing: Collection[int], *numbers: str
) -> tuple[socket.socket, Mapping[str, Any]]:
    """Returns the next connection and what it said first.

    {} if that was no hello with these numbers.
    """
    listener.settimeout(_left(end))
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        raise ProcessLost(f"ranks {sorted(missing)} have not come") from None
    try:
        hello = _hear(connection, _FIRST_WORDS)
        good = all(type(hello.options[name]) is int for name in numbers)
    except Exception:  # a stranger's bytes may break the reading of them anywhere
        return connection, {}
    return connection, hello.options if good and hello.name == _HELLO else {}


def _left(end: float) -> float | None:
    """Returns what a socket may wait; None is for ever."""
    return None if math.isinf(end) else max(end - time.monotonic(), _POLL)


def _say(connection: socket.socket, message: Message) -> None:
    for block in frame(message):
        connection.sendall(block)


def _hear(connection: socket.socket, seconds: float | None) -> Message:
    connection.settimeout(seconds)
    return read_message(connection.recv_into)[0]


def _read(given: Mapping[str, str]) -> tuple[int, int, str, int]:
    missing = [name for name in VARIABLES if name not in given]
    if missing:
        raise ConfigError(
            f"also set {', '.join(missing)}: {', '.join(VARIABLES)} say who is who"
        )
    try:
        rank, size, port = (
            int(given[n]) for n in ("RANK", "WORLD_SIZE", "MASTER_PORT")
        )
    except ValueError as error:
        raise ConfigError("RANK, WORLD_SIZE and MASTER_PORT must be numbers") from error
    checks.require_count(1, WORLD_SIZE=size)
    checks.require(
        0 <= rank < size, "RANK must be one of the ranks", RANK=rank, of=size
    )
    checks.require(
        0 < port < _MOST_PORTS, "MASTER_PORT must be a port", MASTER_PORT=port
    )
    return rank, size, given["MASTER_ADDR"], port
