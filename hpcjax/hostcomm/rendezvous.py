"""How ranks find each other: over listening sockets, on one machine or many."""

import contextlib
import errno
import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError, ProcessLost
from hpcjax.hostcomm.channels import PATIENCE, Message
from hpcjax.hostcomm.link import Link
from hpcjax.hostcomm.reception import (
    HELLO,
    Caller,
    Reception,
    hear,
    left,
    say,
)
from hpcjax.hostcomm.tcp import TcpTransport

log = logging.getLogger(__name__)
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
JOB, SECRET, LISTEN = "HPCJAX_JOB", "HPCJAX_SECRET", "HPCJAX_LISTEN"
# What schedulers call a job, where the user does not.
JOBS = (JOB, "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
_NO_JOB = (None, "", "none")  # the last is what torchrun calls every job
_WELCOME, _REFUSAL, _NONCE = "welcome", "refusal", "nonce"
_POLL = 0.05
_MOST_PORTS = 2**16
Address = tuple[str, int]


def listen(
    host: str = "127.0.0.1", port: int = 0, *, backlog: int = 64
) -> socket.socket:
    """Returns a socket that listens; port 0 is a free one.

    Raises:
      OSError: the port is taken, or the host is not this machine.

    Examples:
      >>> with listen() as listener:
      ...     listener.getsockname()[0]
      '127.0.0.1'
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)
    return socket.create_server((host, port), family=found[0][0], backlog=backlog)


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
        say(made[lower], Message(HELLO, {"rank": rank, "token": token}))

    def greet(connection: socket.socket, end: float) -> Mapping[str, Any]:
        hello = _hear_hello(connection, end, "rank")
        said = str(hello["token"]).encode(errors="replace")
        if not hmac.compare_digest(said, token.encode()):
            raise ProcessLost("who calls does not know the token")
        return hello

    with Reception(listener, end, greet) as reception:
        while missing := set(range(len(addresses))) - made.keys() - {rank}:
            connection, hello = reception.take(missing)
            if hello["rank"] in missing:
                made[hello["rank"]] = connection
            else:
                connection.close()
    return made


class _Place(NamedTuple):
    """What the environment says of a process and its job.

    Attributes:
      rank: of this process.
      size: how many there are.
      master: where rank 0 is reached.
      interface: where rank 0 listens.
      job: what only processes of one job have in common.
      secret: what only they know; may be empty.
    """

    rank: int
    size: int
    master: Address
    interface: str
    job: str
    secret: str

    def prove(self, *said: Any) -> str:
        """Returns what only who knows the secret can say of some words."""
        words = json.dumps([self.job, *said]).encode()
        return hmac.new(self.secret.encode(), words, hashlib.sha256).hexdigest()


def connect(
    *,
    link: Link | None = None,
    patience: float = PATIENCE,
    environment: Mapping[str, str] = os.environ,
) -> TcpTransport:
    """Connects processes of several machines, as the environment says.

    `RANK` is that of this process, `WORLD_SIZE` how many there are; rank 0 listens on
    `MASTER_PORT` of `MASTER_ADDR`, where the others call it, and tells all where the
    others are. `HPCJAX_LISTEN` is another address for rank 0 to listen at, where
    `MASTER_ADDR` is not one of its machine's. `HPCJAX_JOB` (or `SLURM_JOB_ID`, or
    `TORCHELASTIC_RUN_ID`) tells jobs apart that meet at one port.

    Who knows `HPCJAX_SECRET` proves it without sending it, rank 0 too; without one the
    network must be trusted, and what is sent later is never encrypted.

    Args:
      link: which holds back what is sent; None: no more than the network does.
      patience: seconds in which all must have come, and to wait for a silent rank.
      environment: another one than this process's.

    Raises:
      ConfigError: a variable is missing or no such number, or rank 0 cannot listen
        there, for example because another job does.
      ProcessLost: some have not come, or rank 0 has refused this one; says why.

    Examples:
      >>> alone = dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="", MASTER_PORT="1")
      >>> with connect(environment=alone) as transport:
      ...     transport.size
      1
    """
    place, end = _read(environment), time.monotonic() + patience
    if place.size == 1:
        return TcpTransport(0, {}, link=link, patience=patience)
    if place.rank == 0:
        connections = _gather(_listen_as_master(place), place, end)
    else:
        connections = _join(place, end)
    return TcpTransport(place.rank, connections, link=link, patience=patience)


def join(
    rank: int,
    size: int,
    master: Address,
    secret: str,
    *,
    listener: socket.socket | None = None,
    patience: float = PATIENCE,
) -> TcpTransport:
    """Connects processes that know each other already, as those of an SPMD program do.

    Args:
      rank: of this process.
      size: how many there are.
      master: where rank 0 listens.
      secret: what only they know; who does not is not let in.
      listener: rank 0's; it is closed.
      patience: seconds in which all must have come, and to wait for a silent rank.

    Raises:
      ProcessLost: some have not come.
    """
    place = _Place(rank, size, master, master[0], "", secret)
    end = time.monotonic() + patience
    made = _join(place, end) if listener is None else _gather(listener, place, end)
    return TcpTransport(rank, made, patience=patience)


def _listen_as_master(place: _Place) -> socket.socket:
    port = place.master[1]
    try:
        return listen(place.interface, port, backlog=max(64, place.size))
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "another process listens there" if taken else str(error)
        raise ConfigError(
            f"rank 0 cannot listen at {place.interface}:{port}: {why}; choose another "
            f"{'MASTER_PORT' if taken else f'MASTER_ADDR, or set {LISTEN}'}"
        ) from error


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
            return socket.create_connection(address, left(end))
        except OSError as error:
            if not retry or time.monotonic() >= end:
                place = "{}:{}".format(*address)
                raise ProcessLost(f"{who} is not there, at {place}: {error}") from error
        time.sleep(_POLL)


def _gather(
    listener: socket.socket, place: _Place, end: float
) -> dict[int, socket.socket]:
    """Rank 0: waits for all, then tells each where the others listen."""
    made: dict[int, Caller] = {}

    def greet(connection: socket.socket, end: float) -> Mapping[str, Any]:
        hello = _hear_hello(connection, end, "rank", "size", "port")
        if why := _object(connection, hello, place, end):
            _refuse(connection, why)
            raise ProcessLost(why)
        return hello

    with contextlib.ExitStack() as failed:
        with Reception(listener, end, greet) as reception:
            while missing := set(range(1, place.size)) - made.keys():
                caller = reception.take(missing)
                failed.callback(caller.connection.close)
                rank = caller.hello["rank"]
                if rank in missing:
                    made[rank] = caller
                else:
                    _refuse(caller.connection, f"rank {rank} is here already")
        # Nobody calls rank 0 again.
        addresses: list[Address] = [("", 0)]
        for rank in range(1, place.size):
            host = made[rank].connection.getpeername()[0]
            addresses.append((host, made[rank].hello["port"]))
        told = {"addresses": addresses, "token": secrets.token_hex(16)}
        for rank, (connection, hello) in made.items():
            proof = place.prove("welcome", str(hello.get("nonce")))
            try:
                say(connection, Message(_WELCOME, {**told, "proof": proof}))
            except OSError as error:
                raise ProcessLost(f"rank {rank} has ended: {error}") from error
        failed.pop_all()
    return {rank: caller.connection for rank, caller in made.items()}


def _hear_hello(
    connection: socket.socket, end: float, *numbers: str
) -> Mapping[str, Any]:
    """Returns the options of a hello; raises if it is none, or has no such integers."""
    said = hear(connection, end)
    if said.name != HELLO or any(type(said.options[n]) is not int for n in numbers):
        raise ValueError("no hello")
    return said.options


def _refuse(connection: socket.socket, why: str) -> None:
    with contextlib.suppress(OSError):
        say(connection, Message(_REFUSAL, {"why": why}))
    connection.close()


def _object(
    connection: socket.socket, hello: Mapping[str, Any], place: _Place, end: float
) -> str:
    """Returns why a caller is not let in; empty if it is."""
    rank, size = hello["rank"], hello["size"]
    if hello.get("job") != place.job:
        return f"this is job {place.job!r}, not {hello.get('job')!r}"
    if size != place.size:
        return f"WORLD_SIZE is {place.size} here, not {size}"
    nonce = secrets.token_hex(16)
    say(connection, Message(_NONCE, {"nonce": nonce}))
    answer = hear(connection, end).options
    proof = str(answer["proof"]).encode(errors="replace")
    right = place.prove(nonce, rank, size, hello["port"]).encode()
    return "" if hmac.compare_digest(proof, right) else f"{SECRET} is another one"


def _join(place: _Place, end: float) -> dict[int, socket.socket]:
    """Another rank: tells rank 0 where it listens, then meets the others."""
    rank, size = place.rank, place.size
    first, nonce = call(place.master, "rank 0", end, retry=True), secrets.token_hex(16)
    listener = listen(first.getsockname()[0], backlog=max(64, size))
    port = listener.getsockname()[1]
    own = {"rank": rank, "size": size, "port": port, "job": place.job, "nonce": nonce}
    try:
        while True:
            try:
                say(first, Message(HELLO, own))
                told = hear(first, end)
                break
            except (EOFError, ConnectionError):
                # There are too many callers, or rank 0 begins anew.
                first.close()
                if time.monotonic() >= end:
                    raise
                time.sleep(_POLL)
                first = call(place.master, "rank 0", end, retry=True)
        if told.name == _NONCE:
            proof = place.prove(told.options["nonce"], rank, size, port)
            say(first, Message("proof", {"proof": proof}))
            told = hear(first, end)
        if told.name == _REFUSAL:
            raise ProcessLost(str(told.options["why"]))
        theirs = str(told.options["proof"]).encode(errors="replace")
        if not hmac.compare_digest(theirs, place.prove("welcome", nonce).encode()):
            raise ProcessLost(f"who answers there does not know {SECRET}")
        addresses = [(host, port) for host, port in told.options["addresses"]]
        token = told.options["token"]
    except Exception as error:  # other bytes may break the reading of them anywhere
        listener.close()
        first.close()
        why = str(error) or repr(error)
        raise ProcessLost(
            f"rank 0 has not welcomed rank {rank} of {size}: {why}"
        ) from error
    return meet(
        rank,
        listener,
        addresses,
        token,
        patience=max(0.0, end - time.monotonic()),
        known={0: first},
    )


def _read(given: Mapping[str, str]) -> _Place:
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
    job = next((given[name] for name in JOBS if given.get(name) not in _NO_JOB), "")
    if job == given.get("SLURM_JOB_ID"):
        # Steps of one allocation are jobs of their own.
        job = f"{job}.{given.get('SLURM_STEP_ID', '')}"
    if size > 1 and not job:
        raise ConfigError(
            f"also set {JOB}, the same text for all processes of a job and no other: "
            "two jobs at one port would else become one"
        )
    host, secret = given["MASTER_ADDR"], given.get(SECRET, "")
    if rank == 0 < size - 1 and not secret and host not in ("localhost", "127.0.0.1"):
        log.warning("without %s whoever reaches %s can join", SECRET, host)
    interface = given.get(LISTEN) or host
    return _Place(rank, size, (host, port), interface, job, secret)
