"""Measures and stores the inputs of the cost model `cost.exchange_time`.

Links, a model's passes and the encoding of gradients are measured separately. Nothing
is fitted to the time of a whole iteration, since that is what the model predicts.
"""

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from hpcjax import hostcomm
from hpcjax.collectives import Transfer, all_gather, all_reduce
from hpcjax.core import checks, files, provenance
from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.cost.exchange_methods import (
    WORD_BYTES,
    PricedExchange,
    Shapes,
    System,
    Workload,
)
from hpcjax.cost.exchange_time import CALIBRATE
from hpcjax.hostcomm import MessageCost, Tag, Transport

SIZES = (4, 4096, 2**18, 2**20, 2**22, 2**24)
REPETITIONS = 20
_KIND = "exchange calibration"


def time_together(
    transport: Transport,
    thunk: Callable[[], Any],
    *,
    repetitions: int = REPETITIONS,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Times a function that all ranks run at the same time; all ranks must call this.

    Args:
      transport: this rank's.
      thunk: must return only when its work is done.
      repetitions: number of timed calls; each starts behind a barrier.
      warmup: calls before those, which are not timed.
      clock: returns seconds.

    Returns:
      Seconds: the median of each rank, and of these the largest; equal on all ranks.
    """
    checks.require_count(1, repetitions=repetitions)
    seconds = []
    for _ in range(warmup + repetitions):
        hostcomm.barrier(transport, tag=Tag("together"))
        begin = clock()
        thunk()
        seconds.append(clock() - begin)
    # The slowest rank decides when a collective ends. Medians first: their maximum is
    # not raised by single slow calls.
    own = np.array([np.median(seconds[warmup:])])
    tag = Tag("together", 1)
    return float(hostcomm.allreduce(transport, own, operation=np.maximum, tag=tag)[0])


def calibrate(
    transport: Transport,
    sizes: Sequence[int] = SIZES,
    *,
    repetitions: int = REPETITIONS,
    clock: Callable[[], float] = time.perf_counter,
) -> System:
    """Measures the collectives of a transport; all ranks must call this.

    Times all-reduces and all-gathers of each size, and fits one latency alpha and one
    bandwidth to both, see `hostcomm.fit_cost`.

    Args:
      transport: this rank's; must connect at least two ranks.
      sizes: bytes of a rank's array, multiples of four; at least two different ones.
      repetitions: timed calls of each collective and size.
      clock: returns seconds.

    Returns:
      The system with `ranks` processes in a ring and the fitted link.

    Raises:
      ConfigError: a single rank, or invalid sizes.
    """
    checks.require(transport.size > 1, "there must be two ranks", size=transport.size)
    good = len(set(sizes)) > 1 and all(size > 0 and size % 4 == 0 for size in sizes)
    checks.require(
        good, "there must be two sizes, multiples of four", sizes=list(sizes)
    )
    ranks, seconds = transport.size, []
    transfers: list[Transfer] = []
    for size in sizes:
        array = np.zeros(size // 4, np.float32)
        thunks = [
            lambda a=array: hostcomm.allreduce(transport, a),
            lambda a=array: hostcomm.allgatherv(transport, a),
        ]
        transfers += [all_reduce(array.size, ranks), all_gather(array.size, ranks)]
        seconds += [
            time_together(transport, thunk, repetitions=repetitions, clock=clock)
            for thunk in thunks
        ]
    # Only its `rounds` are used before the link is known: seconds = alpha rounds + beta
    # bytes is linear in (alpha, beta), so that one least-squares fit gives both.
    system = System(processes=ranks, link=MessageCost(0.0, 0.0))
    sent_bytes = [WORD_BYTES * transfer.words for transfer in transfers]
    rounds = [system.rounds(transfer) for transfer in transfers]
    link = hostcomm.fit_cost(sent_bytes, seconds, rounds)
    return dataclasses.replace(system, link=link)


class ComputeTime(NamedTuple):
    """Measured seconds of a model's passes over a batch.

    Attributes:
      model: its name.
      batch: examples.
      forward_s: seconds of the forward pass.
      backward_s: seconds of the backward pass alone.
    """

    model: str
    batch: int
    forward_s: float
    backward_s: float


class EncodeTime(NamedTuple):
    """Measured seconds in which a method encodes and decodes the gradients of a model.

    Attributes:
      model: its name.
      method: the method's label, see `cost.PricedExchange.label`.
      processes: number of workers whose gradients are decoded.
      encode_decode_s: seconds.
    """

    model: str
    method: str
    processes: int
    encode_decode_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Computation times measured on one device.

    Attributes:
      device: its name, see `device_name`.
      source: "measured", or "example input" if the times do not come from the device.
      provenance: versions and date, see `core.provenance`.
      compute: times of models' passes.
      encoding: times of encoding and decoding gradients.
    """

    device: str
    source: Literal["measured", "example input"]
    provenance: Mapping[str, Any]
    compute: tuple[ComputeTime, ...]
    encoding: tuple[EncodeTime, ...]

    def workload(
        self, model: str, batch: int, shapes: Shapes, **options: Any
    ) -> Workload:
        """Returns a `Workload` with the measured times of a model.

        Args:
          model: name in `compute`.
          batch: examples, as measured.
          shapes: of the model's gradients.
          **options: further fields of `Workload`.

        Raises:
          ConfigError: the model was not measured with this batch.
        """
        for row in self.compute:
            if (row.model, row.batch) == (model, batch):
                times = {"forward_s": row.forward_s, "backward_s": row.backward_s}
                return Workload(shapes=shapes, batch=batch, **times, **options)
        raise ConfigError(
            f"{model} with a batch of {batch} was not measured on {self.device}: "
            f"`{CALIBRATE}` does"
        )

    def add_encode_time(
        self, method: PricedExchange, model: str, processes: int
    ) -> PricedExchange:
        """Returns the method with its measured `encode_decode_s`.

        A method whose `encode_decode_s` is already set is returned unchanged.

        Raises:
          ConfigError: no measurement for this method, model and number of processes.
        """
        if method.encode_decode_s is not None:
            return method
        for row in self.encoding:
            if row[:3] == (model, method.label, processes):
                return dataclasses.replace(method, encode_decode_s=row.encode_decode_s)
        raise ConfigError(
            f"encode_decode_s of {method.label} for {model} and {processes} workers "
            f"was not measured on {self.device}: `{CALIBRATE}` does"
        )

    def save(self, path: pathlib.Path) -> None:
        """Writes the calibration to a JSON file, atomically."""
        content = {
            "kind": _KIND,
            "units": "seconds",
            "device": self.device,
            "source": self.source,
            "provenance": dict(self.provenance),
            "compute": [row._asdict() for row in self.compute],
            "encoding": [row._asdict() for row in self.encoding],
        }
        files.write_json(path, content)


def load_calibration(path: pathlib.Path, *, force: bool = False) -> Calibration:
    """Reads a file that `Calibration.save` wrote.

    Args:
      path: the file.
      force: accept times of another device than this one.

    Raises:
      ConfigError: the times are of another device.
      DataMissing: no such file.
      DataFormatError: the file holds something else.
    """
    content = files.read_object(path)
    try:
        if content["kind"] != _KIND:
            raise ValueError(f"kind is {content['kind']!r}")
        calibration = Calibration(
            device=content["device"],
            source=content["source"],
            provenance=content["provenance"],
            compute=tuple(ComputeTime(**row) for row in content["compute"]),
            encoding=tuple(EncodeTime(**row) for row in content["encoding"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataFormatError(f"{path}: expected an {_KIND}: {error}") from error
    if not force and calibration.device != device_name():
        raise ConfigError(
            f"{path} is of {calibration.device}, this is {device_name()}: measure here "
            f"with `{CALIBRATE}`, or force it"
        )
    return calibration


def device_name() -> str:
    """Returns the name of JAX's first device; for a CPU, its model and core count."""
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu":
        return f"{provenance.cpu_model()}, {os.cpu_count()} cores"
    return device.device_kind
