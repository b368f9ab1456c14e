"""A live line for the run in progress."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar


@final
class Progress:
    """A `Recorder` that shows name, step, loss and validation error of a run.

    On a terminal the line is redrawn; elsewhere one line is printed when the run ends.
    Of a run that takes no steps, whose total is None, it shows how long it takes.

    Examples:
      >>> with Progress("demo", total=2, quiet=True) as progress:
      ...   progress.write({"step": 1, "loss": 0.5})
    """

    def __init__(
        self, name: str, total: int | None, *, quiet: bool = False, unit: str = "step"
    ) -> None:
        self._console = Console(stderr=True, quiet=quiet, emoji=False)
        self._said = Console(emoji=False)
        self._live = self._console.is_terminal and not quiet
        measured = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        if total is None:  # nobody knows how far it is
            measured = (TimeElapsedColumn(),)
        self._bar = Bar(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            *measured,
            TextColumn("{task.fields[metrics]}"),
            console=self._console,
            disable=not self._live,
            transient=True,
        )
        started = "compiling" * (total is not None and unit == "step")
        self._task = self._bar.add_task(name, total=total, metrics=started)
        self._name, self._unit = name, unit
        self._shown: dict[str, float] = {}
        self._step = None if total is None else 0

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
        outcome = "done" if kind is None else f"stopped: {kind.__name__}"
        place = f" at {self._unit} {self._step} {self._text()}" * (
            self._step is not None
        )
        self._console.print(
            f"{self._name}: {outcome}{place}",
            highlight=False,
            soft_wrap=True,
        )

    def write(self, record: Mapping[str, Any]) -> None:
        """Shows one record of the training loop."""
        self._step = record["step"]
        for name in ("loss", "val_loss", "val_error"):
            if name in record:
                self._shown[name] = record[name]
        self._bar.update(self._task, completed=self._step, metrics=self._text())

    def say(self, text: str, end: str = "\n") -> None:
        """Prints text that is a result of the run on standard output, also if quiet.

        Without an end of line more text is to follow, over which no line is redrawn.
        """
        if not end:
            self._bar.stop()
        options = {"markup": False, "highlight": False, "soft_wrap": True}
        self._said.print(text, end=end, **options)
        self._said.file.flush()

    def rewind(self, step: int) -> float:
        """Shows the step from which the run goes on; returns 0."""
        self.write({"step": step})
        return 0.0

    def _text(self) -> str:
        return "  ".join(f"{name} {value:.4g}" for name, value in self._shown.items())
