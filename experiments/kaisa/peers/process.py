"""A process of another Python environment that answers messages."""

import os
import pathlib
import subprocess
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np

from experiments.kaisa.peers import protocol
from hpcjax.core.errors import DataMissing, HpcjaxError

_LINES = 20
# What would change which packages the other interpreter finds.
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class PeerFailed(HpcjaxError):
    """The peer could not answer; the message has its traceback or its last words."""


class Peer:
    """A script run by another interpreter, on the CPU; a context manager.

    Args:
      python: the interpreter.
      script: answers messages of `protocol` on its standard streams.
      command: makes the interpreter where it is absent, for the error's message.

    Raises:
      DataMissing: there is no such interpreter.
    """

    def __init__(
        self, python: pathlib.Path, script: pathlib.Path, command: str
    ) -> None:
        if not python.is_file():
            raise DataMissing(f"no interpreter {python}: `{command}` makes it")
        kept = {name: value for name, value in os.environ.items() if name not in _OURS}
        self._words = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [python, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env={**kept, "JAX_PLATFORMS": "cpu"},
        )

    def ask(
        self,
        name: str,
        options: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> protocol.Message:
        """Sends a request and waits for its answer.

        Raises:
          PeerFailed: the peer raised, or has ended.
        """
        requests, answers = self._process.stdin, self._process.stdout
        if requests is None or answers is None:
            raise ValueError("the peer was started without pipes")
        try:
            protocol.send(requests, protocol.Message(name, options or {}, arrays or {}))
            reply = protocol.receive(answers)
        except (EOFError, BrokenPipeError) as error:
            raise PeerFailed(f"the peer ended at {name!r}: {self._last()}") from error
        if reply.name == "failed":
            raise PeerFailed(
                f"the peer failed at {name!r}:\n{reply.options['traceback']}"
            )
        return reply

    def _last(self) -> str:
        self._words.seek(0)
        words = self._words.read().decode(errors="replace")
        return "\n".join(words.splitlines()[-_LINES:])

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._words.close()
