"""Layouts of GPT-3's sizes on a machine like Summit, from formulas."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

from hpcjax import cost, runs
from hpcjax.core import config
from hpcjax.hostcomm import MessageCost


class Size(NamedTuple):
    """A model of the paper's table I; widths are those of GPT-3's family."""

    params: float
    layers: int
    width: int
    batch: int


SIZES = {
    "1.3B": Size(1.3e9, 24, 2048, 512),
    "2.7B": Size(2.7e9, 32, 2560, 512),
    "6.7B": Size(6.7e9, 32, 4096, 1024),
    "13B": Size(13e9, 40, 5120, 2048),
}
CHANGES = ("transmission", "bubble", "collective", "gather")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A model, a machine, and what is pruned.

    Attributes:
      model: the size.
      devices: G.
      sparsity: p.
      compressed_sums: whether all-reduces have the kept gradients alone.
      context: tokens of an example; a micro-batch is one.
      device_bytes: of a V100.
      workspace: of them neither state nor activations; an assumption.
      flops: of a device in dense products: 45 % of 125 TFLOP/s; an assumption.
      node_bytes_per_s: of a node's link, which its GPUs share.
      node_devices: GPUs of a node; all send at the same time.
      gather_s: seconds in which a device compresses one gradient value; fitted to the
        paper's 12 % of a step for 2.7B on 128 devices.
      seed: not used; nothing is drawn.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "devices": "64",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "dense_stages samo_stages": ": of the pipeline",
        "dense_peak samo_peak": ": share of 125 TFLOP/s",
        "speedup": ": how much faster the compressed step is, less one",
        "transmission bubble collective gather": ": change in seconds of a dense step",
    }

    model: Literal["1.3B", "2.7B", "6.7B", "13B"] = "2.7B"
    devices: config.Size = 128
    sparsity: config.Share = 0.9
    compressed_sums: bool = True
    context: config.Size = 2048
    device_bytes: config.Positive = 16e9
    workspace: config.Positive = 4e9
    flops: config.Positive = 0.45 * 125e12
    node_bytes_per_s: config.Positive = 12.5e9
    node_devices: config.Size = 6
    gather_s: config.NotNegative = 5.3e-11
    seed: config.Seed = 0


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Plans dense and compressed training."""
    size = SIZES[cfg.model]
    link = MessageCost.of_rate(cfg.node_bytes_per_s / cfg.node_devices)
    forward = 2 * size.params * cfg.context / cfg.flops
    job = cost.PipelineJob(
        size=size.params,
        layers=size.layers,
        devices=cfg.devices,
        device_bytes=cfg.device_bytes,
        batch=size.batch,
        message_bytes=2 * size.width * cfg.context,
        t_f=forward,
        # Gradients of inputs and weights, and the forward pass once more.
        t_b=3 * forward,
        neighbours=link,
        replicas=link,
        workspace=cfg.workspace,
        gather_s=cfg.gather_s * size.params,
    )
    dense = cost.plan_pipeline(job)
    samo = cost.plan_pipeline(job, cfg.sparsity)
    if not cfg.compressed_sums:
        whole = cost.time_pipeline(job, samo.stages).collective
        samo = samo._replace(collective=whole)
    work = 8 * size.params * cfg.context * size.batch / cfg.devices / 125e12
    changes = {
        name: (getattr(samo, name) - getattr(dense, name)) / dense.seconds
        for name in CHANGES
    }
    return runs.analytical(
        {
            "dense_stages": dense.stages,
            "samo_stages": samo.stages,
            "dense_peak": work / dense.seconds,
            "samo_peak": work / samo.seconds,
            "speedup": dense.seconds / samo.seconds - 1,
            **changes,
        }
    )
