"""A thread that does what it is handed, in order, while its owner goes on."""

import collections
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from hpcjax.core.errors import HpcjaxError


class Agent:
    """Does one thing after the other, strictly in the order they were handed over.

    JAX releases Python's lock while it computes and sockets while they wait, so that an
    agent communicates while its owner computes. After an error nothing more is done:
    what follows may rest on what has failed.

    Examples:
      >>> with Agent() as agent:
      ...     first, second = agent.submit(sum, [1, 2]), agent.submit(max, 3, 4)
      ...     second.result(), first.result()
      (4, 3)
    """

    def __init__(self, name: str = "agent") -> None:
        """Starts the thread, which does not keep the process alive."""
        self.changed = threading.Condition()
        self._handed: collections.deque[Work] = collections.deque()
        self._error: BaseException | None = None
        self._closed = self._told = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, function: Callable[..., Any], *args: Any, **options: Any
    ) -> "Work":
        """Hands over a call; returns at once.

        Raises:
          HpcjaxError: the agent is closed.
          Exception: what has failed before.
        """
        work = Work(self, function, args, options)
        with self.changed:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise HpcjaxError("this agent is closed")
            self._handed.append(work)
            self.changed.notify_all()
        return work

    def close(self) -> None:
        """Does what was handed over, then ends.

        Raises:
          Exception: what has failed, if nobody has waited for it.
        """
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        self._thread.join()
        if self._error is not None and not self._told:
            self._told = True
            raise self._error

    def abort(self) -> None:
        """Ends after what it does now; whoever waits for the rest gets an error.

        Does not wait for the end: what it does now may wait for something itself.
        """
        with self.changed:
            self._closed = True
            self._fail(HpcjaxError("this agent was aborted"))

    def __enter__(self) -> "Agent":  # noqa: PYI034  # beartype knows no Self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        for work in self._handed:
            work._end(error=self._error)
        self._handed.clear()
        self.changed.notify_all()

    def _run(self) -> None:
        while True:
            with self.changed:
                while not self._handed and not self._closed:
                    self.changed.wait()
                if not self._handed:
                    return
                work = self._handed.popleft()
            try:
                made, error = work._call(), None
            except BaseException as caught:  # raised by who waits for it
                made, error = None, caught
            with self.changed:
                work._end(made, error)
                if error is not None:
                    self._fail(error)
                self.changed.notify_all()


class Work:
    """Something that was handed to an agent."""

    def __init__(
        self,
        agent: Agent,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        """Made by `Agent.submit`."""
        self._agent, self._function = agent, function
        self._args, self._options = args, options
        self._done, self._made = False, None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Says whether `result` would return, or raise, at once."""
        with self._agent.changed:
            return self._done

    def result(self, timeout: float | None = None) -> Any:
        """Waits until it is done and returns what was made.

        Args:
          timeout: seconds; None: as long as it takes.

        Raises:
          TimeoutError: the timeout is over.
          Exception: what it, or something before it, has raised.
        """
        with self._agent.changed:
            if not self._agent.changed.wait_for(lambda: self._done, timeout):
                raise TimeoutError(f"it was not done within {timeout:g} s")
            if self._error is not None:
                self._agent._told = True
                raise self._error
            return self._made

    def _call(self) -> Any:
        return self._function(*self._args, **self._options)

    def _end(self, made: Any = None, error: BaseException | None = None) -> None:
        self._made, self._error, self._done = made, error, True
        self._args, self._options = (), {}  # may be large
