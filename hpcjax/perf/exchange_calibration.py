"""What `exchange_time` needs to know of links and devices, measured and kept in files.

Links, the backward pass and encoding are measured each by itself. Nothing is fitted to
the times of whole iterations, which are what is predicted.
"""

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from hpcjax import hostcomm
from hpcjax.core import checks, files, provenance
from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.hostcomm import Tag, Transport
from hpcjax.perf.exchange_methods import Method, Shapes, System, Transfer, Workload
from hpcjax.perf.exchange_time import CALIBRATE

SIZES = (4, 4096, 2**18, 2**20, 2**22, 2**24)
REPETITIONS = 20
_KIND = "exchange calibration"


def together(
    transport: Transport,
    thunk: Callable[[], Any],
    *,
    repetitions: int = REPETITIONS,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Returns how long something takes that all ranks do at once; all call it.

    Args:
      transport: ours.
      thunk: returns when it is done.
      repetitions: each behind a barrier.
      warmup: that many before, which do not count.
      clock: seconds.

    Returns:
      The median, that of the slowest rank, in all ranks.
    """
    checks.require_count(1, repetitions=repetitions)
    seconds = []
    for _ in range(warmup + repetitions):
        hostcomm.barrier(transport, tag=Tag("together"))
        begin = clock()
        thunk()
        seconds.append(clock() - begin)
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
    """Measures the collectives of a transport; all ranks call it.

    All-reduces and all-gathers of each size are timed; alpha and the bandwidth are
    those that fit both best, in relative errors.

    Args:
      transport: ours, of two ranks at least.
      sizes: bytes, multiples of four.
      repetitions: of each.
      clock: seconds.

    Raises:
      ConfigError: a single rank, or sizes that cannot be.
    """
    checks.require(transport.size > 1, "there must be two ranks", size=transport.size)
    good = len(set(sizes)) > 1 and all(size > 0 and size % 4 == 0 for size in sizes)
    checks.require(
        good, "there must be two sizes, multiples of four", sizes=list(sizes)
    )
    unit = System(processes=transport.size, bytes_per_s=1.0)
    measured = []
    for size in sizes:
        array = np.zeros(size // 4, np.float32)
        thunks = [
            (unit.all_reduce(size), lambda a=array: hostcomm.allreduce(transport, a)),
            (unit.all_gather(size), lambda a=array: hostcomm.allgatherv(transport, a)),
        ]
        for transfer, thunk in thunks:
            took = together(transport, thunk, repetitions=repetitions, clock=clock)
            measured.append((transfer, took))
    return fit_system(transport.size, measured)


def fit_system(processes: int, measured: Sequence[tuple[Transfer, float]]) -> System:
    """Returns the system whose alpha and bandwidth explain measured seconds best.

    By least squares of relative errors, neither of them negative.

    Raises:
      ConfigError: fewer than two transfers that differ, or one that took no time.

    Examples:
      >>> net = System(processes=4, bytes_per_s=1e9, alpha_s=1e-4)
      >>> moved = [net.all_reduce(size) for size in (4, 10**6)]
      >>> found = fit_system(4, [(each, net.seconds([each])) for each in moved])
      >>> f"{found.alpha_s:.2e} {found.bytes_per_s:.2e}"
      '1.00e-04 1.00e+09'
    """
    from scipy.optimize import nnls

    good = len({each for each, _ in measured}) > 1
    checks.require(good, "there must be two transfers that differ", measured=measured)
    for _, took in measured:
        checks.require_positive(seconds=took)
    rows = np.array([(each.rounds, each.sent_bytes) for each, _ in measured])
    seconds = np.array([took for _, took in measured])
    scale = rows.max(0)
    (alpha, beta), _ = nnls(rows / scale / seconds[:, None], np.ones(len(rows)))
    speed = float(scale[1] / beta) if beta else np.inf
    alpha_s = float(alpha / scale[0])
    return System(processes=processes, bytes_per_s=speed, alpha_s=alpha_s)


class ComputeTime(NamedTuple):
    """Seconds of a model's passes over a batch."""

    model: str
    batch: int
    forward_s: float
    backward_s: float


class EncodeTime(NamedTuple):
    """Seconds that a method computes, by its label, for so many workers."""

    model: str
    method: str
    processes: int
    encode_decode_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Times of one device.

    Attributes:
      device: its name, see `device_name`.
      source: "example input" where the times were not measured on it.
      provenance: versions and date, see `core.provenance`.
      compute: of models.
      encoding: of methods.
    """

    device: str
    source: Literal["measured", "example input"]
    provenance: Mapping[str, Any]
    compute: tuple[ComputeTime, ...]
    encoding: tuple[EncodeTime, ...]

    def workload(
        self, model: str, batch: int, shapes: Shapes, **options: Any
    ) -> Workload:
        """Returns what a model computes; options are further fields of `Workload`.

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

    def timed(self, method: Method, model: str, processes: int) -> Method:
        """Returns a method with its `encode_decode_s`; one that has it as it is.

        Raises:
          ConfigError: it was not measured.
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
        """Writes it as JSON, whole or not at all."""
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
    """Reads what `Calibration.save` has written.

    Args:
      path: the file.
      force: takes the times of another device than this one.

    Raises:
      ConfigError: they are of another device.
      DataMissing: no such file.
      DataFormatError: it holds something else.
    """
    content = files.read_object(path)
    try:
        if content["kind"] != _KIND:
            raise ValueError(f"kind is {content['kind']!r}")
        found = Calibration(
            device=content["device"],
            source=content["source"],
            provenance=content["provenance"],
            compute=tuple(ComputeTime(**row) for row in content["compute"]),
            encoding=tuple(EncodeTime(**row) for row in content["encoding"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataFormatError(f"{path}: expected an {_KIND}: {error}") from error
    if not force and found.device != device_name():
        raise ConfigError(
            f"{path} is of {found.device}, this is {device_name()}: measure here with "
            f"`{CALIBRATE}`, or force it"
        )
    return found


def device_name() -> str:
    """Returns the name of the device that JAX computes on; of a CPU with its cores."""
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu":
        return f"{provenance.cpu_model()}, {os.cpu_count()} cores"
    return device.device_kind
