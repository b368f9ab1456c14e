"""A process of another Python environment that answers messages.

What `hostcomm.local_processes` starts shares our packages; a peer must not.
"""

import contextlib
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

import numpy as np

from experiments.kaisa.peers.protocol import Message, receive, send
from hpcjax.core.errors import DataMissing, HpcjaxError, ProcessLost

_LINES = 20
# Where the other interpreter would find our packages instead of its own.
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class Peer(NamedTuple):
    """The other process.

    Attributes:
      requests: its standard input.
      answers: its standard output.
      words: a file with what it printed.
    """

    requests: IO[bytes]
    answers: IO[bytes]
    words: IO[str]

    def ask(
        self,
        name: str,
        options: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> Message:
        """Sends a request and waits for its answer.

        Raises:
          ProcessLost: the peer has ended; says what it printed last.
          HpcjaxError: the request raised there; with that traceback.
        """
        try:
            send(self.requests, Message(name, options or {}, arrays or {}))
            reply = receive(self.answers)
        except (EOFError, BrokenPipeError):
            self.words.seek(0)
            last = "".join(self.words.readlines()[-_LINES:])
            raise ProcessLost(f"the peer ended at {name!r}:\n{last}") from None
        if reply.name == "failed":
            raise HpcjaxError(f"the peer failed at {name!r}:\n{reply.options['said']}")
        return reply


@contextlib.contextmanager
def start(python: pathlib.Path, script: pathlib.Path, command: str) -> Iterator[Peer]:
    """Runs a script by another interpreter, on the CPU, and ends it afterwards.

    Args:
      python: the interpreter.
      script: answers messages of `protocol` on its standard streams.
      command: makes the interpreter, for the error's message.

    Raises:
      DataMissing: there is no such interpreter.
    """
    if not python.is_file():
        raise DataMissing(f"no interpreter {python}: `{command}` makes one")
    kept = {name: value for name, value in os.environ.items() if name not in _OURS}
    with contextlib.ExitStack() as stack:
        words = stack.enter_context(tempfile.TemporaryFile("w+"))
        process = subprocess.Popen(
            [python, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            env={**kept, "JAX_PLATFORMS": "cpu"},
        )
        stack.callback(process.communicate)
        stack.callback(process.kill)
        if process.stdin is not None and process.stdout is not None:
            yield Peer(process.stdin, process.stdout, words)
