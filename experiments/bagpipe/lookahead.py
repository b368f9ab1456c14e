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
      warm: first steps that are not timed, and
      cool: last ones, in which what looks ahead has nothing to fetch any more.
      pace: seconds that a step lasts at least, from when its rows are there: what runs
        besides on the machine is then of no consequence.
      evict_first: whether rows leave before a batch has updated them: a mistake.
    """

    smoke: ClassVar[Mapping[str, str]] = {"warm": "1", "cool": "0", "pace": "0.0"}
    figures: ClassVar[Mapping[str, str]] = {  # pyrefly: ignore[bad-override]
        "seconds": ": of a step; means, as the next three",
        "waited computed": ": of these, for rows, and by the step itself",
        "plan_seconds": ": of planning a batch",
        "fetched": ": rows over the unique rows of all batches",
        "bytes": ": of a step, both ways",
        "rows unique": ": of the cache, and of a batch",
        "compiled": ": programs that the step was compiled to",
        "digest": ": of all losses, and of the table at the end",
        "loss": "step",
    }

    warm: config.Size = 16
    cool: config.Count = 32
    pace: config.NotNegative = 0.06
    evict_first: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        rule, steps = "there must be steps that are timed", self.train.steps
        good = self.warm + self.cool < steps
        checks.require(good, rule, warm=self.warm, cool=self.cool, steps=steps)

    def labels(self) -> "runs.Labels":
        """Returns the numbers of the steps."""
        return {"step": range(1, self.train.steps + 1)}


@runs.measured
def run(cfg: Config, ctx: "runs.Context") -> "runs.Figures":
    """Trains once."""
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
    timed, nothing = slice(cfg.warm, len(ids) - cfg.cool), np.zeros(len(ids))
    return {
        "seconds": every["lasted"][timed].mean(),
        "waited": every.get("wait_seconds", nothing)[timed].mean(),
        "computed": every["computed"][timed].mean(),
        "plan_seconds": every.get("plan_seconds", nothing)[timed].mean(),
        "fetched": fetched / unique,
        "bytes": (fetched + evicted) * facts.get("row_bytes", 0) / len(ids),
        "rows": facts.get("cache_rows", len(table)),
        "unique": unique / len(ids),
        "compiled": steps.compiled,
        "digest": float(int(digest[:12], 16)),
        "loss": losses,
    }


class Steps:
    """Steps that last as long as they are told, or longer.

    A config says so by `pace` and `evict_first`.

    Attributes:
      compiled: how many programs the step was compiled to.
    """

    def __init__(self, cfg: Any, plain: "Method") -> None:
        self.compiled = 0
        self._cfg, self._plain, self._around = cfg, plain, plain.around
        self._began = self._ended = time.perf_counter()
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
        state, batch = self._around.enter(state, batch, number)
        if self._cfg.evict_first:
            state = self._around.leave(state, number)
        self._began = time.perf_counter()
        return state, batch

    def leave(self, state: Any, number: int) -> Any:
        """Ends a step, when it is computed and was long enough."""
        import jax

        jax.block_until_ready(state)
        computed = time.perf_counter() - self._began
        time.sleep(max(0.0, self._cfg.pace - computed))
        before, self._ended = self._ended, time.perf_counter()
        self._told[number] = {"computed": computed, "lasted": self._ended - before}
        return state if self._cfg.evict_first else self._around.leave(state, number)

    def tell(self, number: int) -> dict[str, float]:
        """Returns how long a step has computed, and lasted with the wait before it."""
        return self._told.pop(number) | self._around.tell(number)
