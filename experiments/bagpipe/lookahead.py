"""Training of DLRM whose table is behind a slow link, by what its cache holds."""

import dataclasses
import hashlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpcjax import data, runs
from hpcjax.core import checks, config
from hpcjax.runs import training

if TYPE_CHECKING:
    from hpcjax.core.method import Method

task = training.task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(training.TrainingConfig):
    """A training run whose steps are as long as they are told; see `TrainingConfig`.

    Attributes:
      warm: first steps that are not timed.
      pace: seconds that a step lasts at least, from when its rows are there: what runs
        besides on the machine is then of no consequence.
      evict_first: whether rows leave before a batch has updated them: a mistake.
    """

    smoke: ClassVar[Mapping[str, str]] = {"warm": "1", "pace": "0.0"}

    warm: config.Size = 16
    pace: config.NotNegative = 0.06
    evict_first: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        rule, steps = "there must be steps after those that are not timed", self.train
        checks.require(self.warm < steps.steps, rule, warm=self.warm, steps=steps.steps)


def outline(cfg: Config) -> "runs.Outline":
    """Returns the form of a result."""
    figures = ("seconds", "waited", "computed", "fetched", "bytes", "rows", "unique")
    more = ("plan_seconds", "compiled", "digest")
    return runs.outline(
        dict.fromkeys((*figures, *more), "") | {"loss": "step"},
        step=range(1, cfg.train.steps + 1),
    )


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Trains once.

    Returns:
      Seconds of a step, of these the wait for rows, and those that the step itself has
      computed, all means; rows fetched over unique rows of all batches; bytes of a
      step, both ways; rows of the cache, and unique ones of a batch; seconds of
      planning a batch; programs that the step was compiled to; a digest of all losses
      and of the table at the end; and the losses.
    """
    made = task(cfg, ctx.data_root, ctx.mesh.size)
    steps, facts = Steps(cfg, made.method), made.method.facts
    paced = made.replace(method=steps.method())
    history = ctx.train(paced, cfg.train, seed=cfg.seed, source="measured")
    stream = data.batches(made.dataset.train, cfg.train.batch_size, cfg.seed)
    ids = [stream[number]["x"]["ids"] for number in range(cfg.train.steps)]
    unique = sum(len(np.unique(batch)) for batch in ids)
    assert ctx.trained is not None
    table = np.ascontiguousarray(ctx.trained.params["table"])
    losses = history["loss"].values.astype(np.float32)
    digest = hashlib.sha256(losses.tobytes() + table.tobytes()).hexdigest()
    every = {name: column.values for name, column in history.items()}
    fetched, evicted = (
        np.sum(every.get(f"rows_{what}", 0)) for what in ("fetched", "evicted")
    )
    timed = slice(cfg.warm, None)
    nothing = np.zeros(cfg.train.steps)
    return runs.measured(
        {
            "seconds": every["lasted"][timed].mean(),
            "waited": every.get("wait_seconds", nothing)[timed].mean(),
            "computed": every["computed"][timed].mean(),
            "fetched": fetched / unique,
            "bytes": (fetched + evicted) * facts.get("row_bytes", 0) / len(ids),
            "rows": facts.get("cache_rows", len(table)),
            "unique": unique / len(ids),
            "plan_seconds": every.get("plan_seconds", nothing).mean(),
            "compiled": steps.compiled,
            "digest": float(int(digest[:12], 16)),
            "loss": ("step", losses),
        },
        coords={"step": history["step"].values},
    )


class Steps:
    """Steps that last as long as they are told, or longer.

    Attributes:
      compiled: how many programs the step was compiled to.
    """

    def __init__(self, cfg: Config, plain: "Method") -> None:
        self.compiled = 0
        self._cfg, self._plain, self._around = cfg, plain, plain.around
        self._began = self._ended = self._computed = 0.0
        self._running: tuple[Any, int] | None = None
        self._told: dict[int, dict[str, float]] = {}

    def method(self) -> "Method":
        """Returns the method, with steps of this length."""
        own = {"enter": self.enter, "leave": self.leave, "tell": self.tell}
        around = self._around._replace(**own)
        return self._plain._replace(around=around, gradients=self.gradients)

    def gradients(self, one_pass: Any, params: Any, state: Any) -> Any:
        """Returns gradients; it is traced for each program."""
        self.compiled += 1
        return self._plain.gradients(one_pass, params, state)

    def enter(self, state: Any, batch: Any, number: int) -> tuple[Any, Any]:
        """Begins a step, when its rows are there."""
        self._end()
        state, batch = self._around.enter(state, batch, number)
        if self._cfg.evict_first:
            state = self._around.leave(state, number)
        self._began = time.perf_counter()
        return state, batch

    def leave(self, state: Any, number: int) -> Any:
        """Waits until a step is computed; it goes on while the loop does other work."""
        import jax

        jax.block_until_ready(state)
        self._computed = time.perf_counter() - self._began
        self._running = state, number
        return state

    def _end(self) -> None:
        """Ends the step that goes on; its update is there when it was long enough."""
        if self._running is None:
            return
        (state, number), self._running = self._running, None
        time.sleep(max(0.0, self._began + self._cfg.pace - time.perf_counter()))
        before, self._ended = self._ended or self._began, time.perf_counter()
        lasted = self._ended - before
        self._told[number] = {"computed": self._computed, "lasted": lasted}
        if not self._cfg.evict_first:
            self._around.leave(state, number)  # the same state

    def tell(self, number: int) -> dict[str, float]:
        """Returns how long a step has computed, and lasted with the wait before it."""
        if number not in self._told:
            self._end()
        return self._told.pop(number) | self._around.tell(number)
