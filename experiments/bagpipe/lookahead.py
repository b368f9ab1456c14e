"""Training of DLRM whose table is behind a slow link, by what its cache holds."""

import contextlib
import dataclasses
import hashlib
import pathlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from hpcjax import runs
from hpcjax.core import checks, config
from hpcjax.data import ClicksConfig
from hpcjax.models import DlrmConfig

if TYPE_CHECKING:
    from hpcjax import data, train

Policy = Literal["whole", "no_cache", "static_hot", "lru", "lookahead"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Training, a link, and what the cache holds.

    Attributes:
      policy: of the cache. "whole": none, the table is on the device.
      lookahead: batches that are looked ahead.
      capacity_of: all caches have the rows that look-ahead by so many batches needs.
      every: batches between two moves of look-ahead; None for a fourth of it.
      evict_first: whether rows leave before a batch has updated them: a mistake.
      dataset: the clicks.
      model: the network.
      optimizer: of all parameters.
      lr: learning rate.
      batch_size: examples of a step.
      steps: of training.
      warm: first steps that are not timed.
      pace: seconds that a step lasts at least, from when its rows are there: what runs
        besides on the machine is then of no consequence.
      rate: bytes per second in each direction of the link.
      latency: seconds of each request.
      piece: rows of a request.
      seed: of parameters and order.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "dataset.examples": "80",
        "dataset.tables": "2",
        "dataset.rows": "30",
        "model.width": "4",
        "model.bottom": "[5]",
        "model.top": "[6]",
        "batch_size": "8",
        "steps": "4",
        "warm": "1",
        "piece": "8",
        "latency": "0.0",
        "pace": "0.0",
    }

    policy: Policy = "lookahead"
    lookahead: config.Size = 16
    capacity_of: config.Size | None = None
    every: config.Size | None = None
    evict_first: bool = False
    dataset: ClicksConfig = ClicksConfig(examples=20_000, tables=26, rows=20_000)
    model: DlrmConfig = DlrmConfig(bottom=(256, 64), top=(256, 128))
    optimizer: Literal["sgd", "row_adagrad"] = "row_adagrad"
    lr: config.Positive = 0.02
    batch_size: config.Size = 256
    steps: config.Size = 64
    warm: config.Size = 16
    pace: config.NotNegative = 0.06
    rate: config.Positive = 10e6
    latency: config.NotNegative = 5e-4
    piece: config.Size = 1024
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "there must be steps after those that are not timed"
        checks.require(self.warm < self.steps, rule, warm=self.warm, steps=self.steps)


def outline(cfg: Config) -> "runs.Outline":
    """Returns the form of a result."""
    figures = ("seconds", "waited", "computed", "fetched", "bytes", "rows", "unique")
    more = ("plan_seconds", "compiled", "digest")
    return runs.outline(
        dict.fromkeys((*figures, *more), "") | {"loss": "step"},
        step=range(1, cfg.steps + 1),
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
    job = prepare(cfg, ctx)
    done = train_whole(cfg, job) if cfg.policy == "whole" else train_cached(cfg, job)
    unique = sum(len(np.unique(ids)) for ids in job.ids)
    losses = np.array(done.steps.losses, np.float32)
    content = losses.tobytes() + np.ascontiguousarray(done.table).tobytes()
    timed = slice(cfg.warm - 1, None)
    return runs.measured(
        {
            "seconds": np.diff(done.steps.ends)[timed].mean(),
            "waited": np.diff(done.steps.waits)[timed].mean(),
            "computed": np.mean(done.steps.computed[cfg.warm :]),
            "fetched": done.fetched / unique,
            "bytes": done.bytes / cfg.steps,
            "rows": done.rows,
            "unique": unique / cfg.steps,
            "plan_seconds": done.plan_seconds / cfg.steps,
            "compiled": done.steps.compiled(),
            "digest": float(int(hashlib.sha256(content).hexdigest()[:12], 16)),
            "loss": ("step", losses),
        },
        coords={"step": np.arange(1, cfg.steps + 1)},
    )


class Job(NamedTuple):
    """What all policies train: batches, their rows, and what makes a task."""

    dataset: "data.Dataset"
    batches: list[Any]
    ids: list[np.ndarray]
    tables: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(self.tables)


class Steps:
    """Steps that last as long as they are told, or longer; and what is known of them.

    Attributes:
      losses: of each step.
      computed: seconds that each has computed.
      ends: when each has ended.
      waits: seconds of waiting for rows until then.
    """

    def __init__(self, cfg: Config, step: Any, mesh: Any) -> None:
        self.losses: list[float] = []
        self.computed: list[float] = []
        self.ends: list[float] = []
        self.waits: list[float] = []
        self._pace, self._step, self._mesh = cfg.pace, step, mesh

    def take(self, state: Any, batch: Any, waited: float) -> Any:
        """Takes a step; its update is there when it has lasted long enough."""
        from hpcjax import sharding

        began = time.perf_counter()
        state, metrics = self._step(state, sharding.place_batch(batch, self._mesh))
        self.losses.append(float(metrics["loss"]))
        self.computed.append(time.perf_counter() - began)
        time.sleep(max(0.0, self._pace - self.computed[-1]))
        self.ends.append(time.perf_counter())
        self.waits.append(waited)
        return state

    def compiled(self) -> int:
        """Returns how many programs the step was compiled to."""
        return self._step._cache_size()


class Done(NamedTuple):
    """What a training run has come to; see `run`."""

    steps: Steps
    table: np.ndarray
    rows: int
    fetched: int = 0
    bytes: int = 0
    plan_seconds: float = 0.0


def prepare(cfg: Config, ctx: "runs.Context") -> Job:
    """Returns the batches in their order."""
    from hpcjax import data

    dataset = cfg.dataset.load(getattr(ctx, "data_root", None))
    stream = data.batches(dataset.train, cfg.batch_size, cfg.seed)
    batches = [stream[number] for number in range(cfg.steps)]
    ids = [batch["x"]["ids"] for batch in batches]
    return Job(dataset, batches, ids, dataset.tables or ())


def make_task(cfg: Config, job: Job, tables: tuple[int, ...]) -> "train.Task":
    """Returns the task, with a table of as many rows as are given."""
    import optax

    from hpcjax import core, optim, train

    scale = optim.scale_by_row_adagrad()
    parts = [scale] if cfg.optimizer == "row_adagrad" else []
    tx = optax.chain(*parts, optax.scale_by_learning_rate(cfg.lr))
    optim.check_rows_apart(tx)
    dataset = job.dataset._replace(tables=tables)
    model = cfg.model.make(
        dataset.inputs, dataset.outputs, core.Policy(), **dataset.given
    )
    return train.supervised(model, optim.data_parallel(tx), dataset)


def train_whole(cfg: Config, job: Job) -> Done:
    """Trains with the table on the device: what all others must come to."""
    from hpcjax import train

    task = make_task(cfg, job, job.tables)
    mesh = task.mesh(1)
    state = train.init_state(task, cfg.seed, mesh)
    steps = Steps(cfg, train.train_step(task, mesh, state, check=False), mesh)
    for batch in job.batches:
        state = steps.take(state, batch, 0.0)
    return Done(steps, np.asarray(state.params["table"]), job.rows)


def train_cached(cfg: Config, job: Job) -> Done:
    """Trains through a cache, from a store behind a slow link."""
    from hpcjax import data, train

    reach = cfg.capacity_of or cfg.lookahead
    capacity = data.rows_needed(job.ids, reach)
    began = time.perf_counter()
    turns = list(data.assign_slots(moves(cfg, job, capacity), job.rows, capacity))
    plan_seconds = time.perf_counter() - began
    whole = make_task(cfg, job, job.tables)
    mesh = whole.mesh(1)
    rows, state = train.split_rows(train.init_state(whole, cfg.seed, mesh), capacity)
    task = make_task(cfg, job, (capacity + 1,))
    steps = Steps(cfg, train.train_step(task, mesh, state, check=False), mesh)
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        read, write = (
            stack.enter_context(
                contextlib.closing(
                    data.SharedRate(folder / name, cfg.rate, cfg.latency)
                )
            )
            for name in ("read", "write")
        )
        store = data.RowStore(rows, reading=read.take, writing=write.take)
        cache = stack.enter_context(train.RowCache(store, state, piece=cfg.piece))
        cache.leave(state, turns[0])
        for turn in turns[1:]:
            state = cache.enter(state, turn.step)
            if cfg.evict_first:
                cache.leave(state, turn)
            batch = place_slots(job.batches[turn.step], turn)
            state = steps.take(state, batch, cache.waited)
            if not cfg.evict_first:
                cache.leave(state, turn)
    return Done(
        steps,
        store.arrays["params/table"],
        capacity,
        fetched=cache.moved["fetched"],
        bytes=store.bytes_read + store.bytes_written,
        plan_seconds=plan_seconds,
    )


def place_slots(batch: Any, turn: "data.Turn") -> Any:
    """Returns a batch that has slots in the place of rows."""
    return {**batch, "x": {**batch["x"], "ids": turn.slots.astype(np.int32)}}


def moves(cfg: Config, job: Job, capacity: int) -> Iterator["data.Move"]:
    """Returns what a policy moves."""
    from hpcjax import data

    if cfg.policy == "no_cache":
        return data.lookahead_moves(job.ids, job.rows, 0)
    if cfg.policy == "static_hot":
        hot = data.hottest_rows(job.ids, job.rows, capacity)
        return data.static_moves(job.ids, hot)
    if cfg.policy == "lru":
        return data.lru_moves(job.ids, capacity)
    return data.lookahead_moves(job.ids, job.rows, cfg.lookahead, every=cfg.every)
