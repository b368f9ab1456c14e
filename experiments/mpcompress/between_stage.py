"""What a process of `between` does: one of two stages, with each codec in turns."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.mpcompress.between import CODES, Config
from hpcjax import hostcomm, perf, sharding

SIZES = (64, 64 * 1024, 512 * 1024)  # bytes by which a link is measured


def layer(kernels: Any, x: Any, _: Any) -> jax.Array:
    """Returns x + tanh(x A) B, `[rows, width]`."""
    return x + jnp.tanh(x @ kernels["in"]) @ kernels["out"]


def loss(kernels: Any, x: Any, target: Any) -> jax.Array:
    """Returns the mean squared error of the last stage."""
    return jnp.mean((layer(kernels, x, None) - target) ** 2)


def work(transport: hostcomm.Transport, cfg: Config) -> dict[str, Any]:
    """Runs steps with all codecs in turns, after each alone.

    Returns:
      `steps`, by codec and round seconds of begin and end; `sent`, bytes that arrays of
      a step have; of rank 0 `alone`, see `_alone`, and `headers`, bytes of each message
      up and down beside its arrays; `link`, fitted latency and seconds of a byte.
    """
    pairs = {name: stages(cfg, name) for name in CODES}
    told: dict[str, Any] = {"alone": {}, "headers": {}, "sent": {}}
    if transport.rank == 0:
        for name, pair in pairs.items():
            told["alone"][name], told["headers"][name] = _alone(cfg, name, pair)
    hostcomm.barrier(transport, tag=hostcomm.Tag("alone"))
    seconds = hostcomm.ping_pong(transport, SIZES, repetitions=5, warmup=1)
    told["steps"] = {name: [] for name in CODES}
    for turn in range(-1, cfg.rounds):
        for place, (name, pair) in enumerate(pairs.items()):
            number = (turn + 1) * len(pairs) + place
            span, sent = _step(transport, cfg, pair[transport.rank], number)
            if turn >= 0:
                told["steps"][name].append(span)
            told["sent"][name] = sent
    fitted = hostcomm.fit_cost(SIZES, seconds.tolist())
    return told | {"link": [fitted.alpha, fitted.beta]}


def stages(cfg: Config, name: str) -> tuple[perf.StageWork, perf.StageWork]:
    """Returns both stages with a codec."""
    codec, rng = cfg.codec(name), np.random.Generator(np.random.Philox(cfg.seed))
    square, flat = (cfg.width, cfg.hidden), (cfg.hidden, cfg.width)

    def draw() -> dict[str, Any]:
        pair = rng.standard_normal(square, np.float32), rng.standard_normal(flat)
        return {
            key: (each / np.sqrt(len(each))).astype(np.float32)
            for key, each in zip(("in", "out"), pair, strict=True)
        }

    first, last = draw(), draw()
    shape = cfg.micro_batches, cfg.rows, cfg.width
    x, targets = rng.standard_normal((2, *shape), np.float32)
    more: dict[str, Any] = {}
    if codec is not None:
        own = codec.init(jax.random.key(cfg.seed), cfg.width)
        first, last = {"stage": first, "sent": own}, {"stage": last, "received": own}
        more = {"codec": codec, "like": jax.ShapeDtypeStruct(shape[1:], "float32")}
    return (
        perf.StageWork(layer, first, cfg.micro_batches, inputs=x, **more),
        perf.StageWork(loss, last, cfg.micro_batches, targets=targets, **more),
    )


def _step(
    transport: hostcomm.Transport, cfg: Config, own: perf.StageWork, number: int
) -> tuple[list[float], int]:
    """Runs a step; returns its begin and end, and the bytes of arrays that are sent."""
    device = perf.DeviceWork(run_op=own.run_op, run_task=print, flush=lambda _: None)
    pipeline = perf.HostPipeline(None, transport, device)
    count = cfg.micro_batches
    order = sharding.MessageDriven(2, transport.rank, count, count)
    hostcomm.barrier(transport, tag=hostcomm.Tag("step", number))
    before = transport.counters()
    pipeline.step(number, order)
    own.take_gradient()
    sent = transport.counters().since(before).total_sent().payload
    return list(pipeline.steps[-1]), sent


def _alone(
    cfg: Config, name: str, pair: tuple[perf.StageWork, perf.StageWork]
) -> tuple[list[float], list[int]]:
    """Times passes, encode and decode without a link, medians of all micro-batches.

    Also returns the bytes of a message up, and of one down, that are no array's.
    """
    first, last = pair
    seconds, up, down = [], np.zeros(0), None
    for _ in range(2):  # the first time compiles
        seconds = []
        for number in range(cfg.micro_batches):
            begin = time.perf_counter()
            up = first.run_op(sharding.Op(0, "F", 0, number), None)
            last.run_op(sharding.Op(1, "F", 1, number), up)
            down = last.run_op(sharding.Op(1, "B", 1, number), None)
            first.run_op(sharding.Op(0, "B", 0, number), down)
            seconds.append(time.perf_counter() - begin)
        for each in pair:
            each.take_gradient()
    codec = cfg.codec(name)
    if codec is None:
        return [float(np.median(seconds)), 0.0, 0.0], [0, 0]
    headers = []
    for sent in map(np.asarray, (up, down)):
        leaves = jax.tree.leaves(hostcomm.unpack_array(first.message, sent))
        headers.append(sent.size - sum(leaf.nbytes for leaf in leaves))
    own = codec.init(jax.random.key(cfg.seed), cfg.width)
    y = jax.random.normal(jax.random.key(1), (cfg.rows, cfg.width))
    encode = jax.jit(lambda y: codec.encode(y, own))
    decode = jax.jit(lambda code: codec.decode(code, y, own))
    code = encode(y)
    times = [_time(cfg, encode, y), _time(cfg, decode, code)]
    return [float(np.median(seconds)), *times], headers


def _time(cfg: Config, function: Callable[[Any], Any], given: Any) -> float:
    jax.block_until_ready(function(given))
    seconds = []
    for _ in range(2 * cfg.micro_batches):
        begin = time.perf_counter()
        jax.block_until_ready(function(given))
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds))
