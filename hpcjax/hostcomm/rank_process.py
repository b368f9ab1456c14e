"""A process that `launch` has started: connects with the others, does one thing."""

import os
import pkgutil
import sys
import threading
from typing import Any

from hpcjax.core.errors import ProcessLost
from hpcjax.hostcomm.channels import Message
from hpcjax.hostcomm.link import Link
from hpcjax.hostcomm.local_processes import Member, join_processes
from hpcjax.hostcomm.packing import pack, unpack
from hpcjax.hostcomm.rendezvous import meet
from hpcjax.hostcomm.tcp import TcpTransport


def main() -> int:
    """Does what is asked; returns the exit status."""
    member = join_processes(sys.argv[1])
    return member.serve(lambda request: _answer(member, request))


def _answer(member: Member, request: Message) -> Message:
    threading.Thread(target=_end_with, args=(member,), daemon=True).start()
    asked = unpack(request)
    transport = _transport(member, asked)
    try:
        function = pkgutil.resolve_name(asked["function"])
        made = pack("done", function(transport, *asked["arguments"]))
    except BaseException as error:
        transport.abort(error)
        raise
    # The process lives until the launcher has all answers: nobody loses anything.
    transport.close(linger=0.0)
    return made


def _transport(member: Member, asked: dict[str, Any]) -> TcpTransport:
    if member.listener is None:
        raise ValueError("a rank needs a listening socket")
    addresses = [(host, port) for host, port in asked["addresses"]]
    connections = meet(
        member.rank,
        member.listener,
        addresses,
        asked["token"],
        patience=asked["patience"],
    )
    link = None if asked["link"] is None else Link(**asked["link"])
    return TcpTransport(member.rank, connections, link=link, patience=asked["patience"])


def _end_with(member: Member) -> None:
    """Ends this process with the one that has started it, whatever it is doing."""
    try:
        member.control.receive("nothing")
    except ProcessLost:
        os._exit(ProcessLost.exit_code)


if __name__ == "__main__":
    sys.exit(main())
