"""A process of another Python environment that answers requests.

What `hostcomm.local_processes` starts shares our packages; a peer must not.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from hpcjax.core.errors import DataMissing, HpcjaxError, ProcessLost

_LINES = 20
# Where the other interpreter would find our packages instead of its own.
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class Peer(NamedTuple):
    """The other process.

    Attributes:
      connection: to it.
      words: a file with what it printed.
    """

    connection: multiprocessing.connection.Connection
    words: IO[str]

    def ask(self, name: str, *given: Any) -> Any:
        """Sends a request and what it is about, and returns the answer.

        Raises:
          ProcessLost: the peer has ended; says what it printed last.
          HpcjaxError: the request raised there; with that traceback.
        """
        try:
            self.connection.send((name, given))
            answer, said = self.connection.recv()
        except (EOFError, OSError):
            self.words.seek(0)
            last = "".join(self.words.readlines()[-_LINES:])
            raise ProcessLost(f"the peer ended at {name!r}:\n{last}") from None
        if said:
            raise HpcjaxError(f"the peer failed at {name!r}:\n{said}")
        return answer


@contextlib.contextmanager
def start(python: pathlib.Path, script: pathlib.Path, command: str) -> Iterator[Peer]:
    """Runs a script by another interpreter, on the CPU, and ends it afterwards.

    Args:
      python: the interpreter.
      script: receives requests, `(name, given)`, from the connection whose number it is
        given, and sends back answers, `(answer, traceback)`.
      command: makes the interpreter, for the error's message.

    Raises:
      DataMissing: there is no such interpreter.
    """
    if not python.is_file():
        raise DataMissing(f"no interpreter {python}: `{command}` makes one")
    kept = {name: value for name, value in os.environ.items() if name not in _OURS}
    with contextlib.ExitStack() as stack:
        words = stack.enter_context(tempfile.TemporaryFile("w+"))
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            process = subprocess.Popen(
                [python, script, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdout=words,
                stderr=words,
                env={**kept, "JAX_PLATFORMS": "cpu"},
            )
        stack.callback(process.wait)
        stack.callback(process.kill)
        yield Peer(stack.enter_context(ours), words)
