"""Seconds of passes and of encoding on this device, for predictions."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from experiments.gradcomp.methods import CONFIGS
from experiments.gradcomp.networks import NETWORKS
from hpcjax import collectives, hostcomm, perf, runs
from hpcjax.core import checks, config

if TYPE_CHECKING:
    import xarray as xr

FILE = "calibration.json"
# More workers are more to decode.
GATHERED = collectives.TopKConfig, collectives.MsTopKConfig, collectives.SignConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """What is measured.

    Attributes:
      models: of `NETWORKS`.
      batches: examples on one worker.
      methods: labels of those that compute something.
      processes: numbers of workers whose gradients are decoded.
      repetitions: of each measurement; the median counts.
      seed: of parameters, examples and gradients.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "models": '["resnet8"]',
        "batches": "[2]",
        "methods": '["signSGD"]',
        "processes": "[2]",
        "repetitions": "1",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "forward backward": "model batch: seconds",
        "encode_decode": "model method processes: seconds",
    }

    models: tuple[str, ...] = ("resnet50", "resnet101", "bert_base")
    batches: tuple[config.Size, ...] = (16, 32, 64)
    methods: tuple[str, ...] = tuple(CONFIGS)
    processes: tuple[config.Size, ...] = (8, 16, 32, 64, 96)
    repetitions: config.Size = 20
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.models:
            checks.require_choice("models", name, tuple(NETWORKS))
        for label in self.methods:
            checks.require_choice("methods", label, tuple(CONFIGS))

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        # A table of rows becomes arrays whose labels are sorted.
        return {
            "model": sorted(self.models),
            "batch": sorted(self.batches),
            "method": sorted(self.methods),
            "processes": sorted(self.processes),
        }


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Measures; leaves the calibration as `calibration.json` in the run's folder."""
    from hpcjax.core import provenance

    (alone,) = hostcomm.connected(1)
    with alone:
        compute = [row for name in cfg.models for row in passes(cfg, alone, name)]
        encoding = [row for name in cfg.models for row in encoded(cfg, alone, name)]
    perf.Calibration(
        device=perf.device_name(),
        source="measured",
        provenance=provenance.collect(seed=cfg.seed, devices=True),
        compute=tuple(compute),
        encoding=tuple(encoding),
    ).save(ctx.directory.path / FILE)
    return runs.measured(
        {
            "forward": _grid(compute, ("model", "batch"), "forward_s"),
            "backward": _grid(compute, ("model", "batch"), "backward_s"),
            "encode_decode": _grid(
                encoding, ("model", "method", "processes"), "encode_decode_s"
            ),
        }
    )


def passes(cfg: Config, alone: Any, model: str) -> "list[perf.ComputeTime]":
    """Returns seconds of a model's passes, for each batch."""
    from experiments.gradcomp import networks

    rows = []
    for batch in cfg.batches:
        forward, both = (
            perf.time_together(alone, thunk, repetitions=cfg.repetitions)
            for thunk in networks.passes(model, batch, cfg.seed)
        )
        # A difference of medians of what is short can be anything.
        backward = max(both - forward, 0.0)
        rows.append(perf.ComputeTime(model, batch, forward, backward))
    return rows


def encoded(cfg: Config, alone: Any, model: str) -> "list[perf.EncodeTime]":
    """Returns seconds of encoding and decoding, for each method and number of workers.

    What is all-reduced is not decoded more often with more workers: it is measured
    once.
    """
    import jax

    grads = gradients(model, cfg.seed)
    rows = []
    for label in cfg.methods:
        gathered = isinstance(CONFIGS[label], GATHERED)
        seconds = None
        for processes in cfg.processes:
            if gathered or seconds is None:
                thunk = perf.encode_decode(CONFIGS[label].make(), grads, processes)
                seconds = perf.time_together(alone, thunk, repetitions=cfg.repetitions)
                jax.clear_caches()  # programs for 96 workers are large
            rows.append(perf.EncodeTime(model, label, processes, seconds))
    return rows


def gradients(model: str, seed: int) -> Any:
    """Returns arrays of a model's shapes, normally distributed."""
    import jax

    from experiments.gradcomp.networks import shapes_of

    shapes = shapes_of(model)
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [
        jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)
    ]


def _grid(rows: list[Any], dims: tuple[str, ...], column: str) -> "xr.DataArray":
    import pandas as pd

    table = pd.DataFrame([row._asdict() for row in rows])
    return table.set_index(list(dims))[column].to_xarray()
