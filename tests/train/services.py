"""Reads back what writers wrote, without the writers: `{(step, name): values}`."""

import collections
import json
import pathlib
import struct
import time
from collections.abc import Iterator

import pytest

BLOCK = 32768  # of LevelDB's log format
Held = dict[tuple[int, str], list[float]]


def tensorboard(run: pathlib.Path) -> tuple[Held, str]:
    """Returns the scalars of the one event file, and the text `config`."""
    from tensorboardX.proto import event_pb2

    (path,) = (run / "tensorboard").iterdir()
    scalars, config = collections.defaultdict(list), ""
    for data in _tfrecords(path.read_bytes()):
        event = event_pb2.Event.FromString(data)
        for value in event.summary.value:
            if value.HasField("tensor"):
                config += value.tensor.string_val[0].decode()
                continue
            scalars[event.step, value.tag].append(value.simple_value)
    return scalars, config


def _tfrecords(content: bytes) -> Iterator[bytes]:
    from tensorboardX.crc32c import crc32c

    def masked(data: bytes) -> int:
        crc = crc32c(data)
        return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF

    at = 0
    while at < len(content):
        length, of_length = struct.unpack_from("<QI", content, at)
        data = content[at + 12 : at + 12 + length]
        (of_data,) = struct.unpack_from("<I", content, at + 12 + length)
        assert of_length == masked(content[at : at + 8])
        assert of_data == masked(data)
        yield data
        at += 16 + length


def wandb(run: pathlib.Path) -> tuple[Held, str]:
    """Returns the history of the one offline run, and its config."""
    from wandb.proto import wandb_internal_pb2

    (path,) = (run / "wandb").glob("offline-run-*/*.wandb")
    records = []
    # Its process writes the end a moment after `finish` has returned.
    while not any(record.HasField("exit") for record in records):
        time.sleep(0.01)
        read = wandb_internal_pb2.Record.FromString
        records = [read(data) for data in _levels(path.read_bytes()[7:])]
    history, config = collections.defaultdict(list), ""
    for record in records:
        config += "".join(item.value_json for item in record.run.config.update)
        step = record.history.step.num
        for item in record.history.item:
            name = item.key or ".".join(item.nested_key)
            if not name.startswith("_"):
                history[step, name].append(float(json.loads(item.value_json)))
    return history, config


def _levels(content: bytes) -> Iterator[bytes]:
    """Yields the records of LevelDB's log format; the file's head counts as 7 bytes."""
    at, whole = 0, b""
    while at < len(content):
        left = BLOCK - (at + 7) % BLOCK
        if left < 7:
            at += left
            continue
        if at + 7 > len(content):
            return
        _, length, kind = struct.unpack_from("<IHB", content, at)
        if at + 7 + length > len(content):
            return  # it is being written
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            yield whole
            whole = b""


def mlflow(run: pathlib.Path) -> tuple[Held, str]:
    """Returns the metrics of the one run that is not deleted, and its parameters."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=(run / "mlflow").as_uri())
    experiments = [each.experiment_id for each in client.search_experiments()]
    (found,) = client.search_runs(experiments)
    metrics = collections.defaultdict(list)
    for name in found.data.metrics:
        for metric in client.get_metric_history(found.info.run_id, name):
            metrics[metric.step, name].append(metric.value)
    return metrics, json.dumps(found.data.params)


READERS = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}


def expected(service: str, records: list[dict]) -> Held:
    """Returns what the copy of `records` must hold, as its service rounds.

    TensorBoard's numbers are float32, and wandb has the last value of a step.
    """
    close = 1e-6 if service == "tensorboard" else 0.0
    wanted = collections.defaultdict(list)
    for record in records:
        for name, value in record.items():
            if name != "step" and not isinstance(value, str):
                values = wanted[record["step"], name]
                values.append(pytest.approx(value, rel=close, abs=0.0, nan_ok=True))
                if service == "wandb":
                    del values[:-1]
    return wanted
