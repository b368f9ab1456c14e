"""Making benchmark tables on a GPU that is reserved for some minutes."""

import hashlib
import logging
import os
import pathlib
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from hpcjax.core import provenance
from hpcjax.core.errors import (
    ConfigError,
    DataFormatError,
    DiskFull,
    HpcjaxError,
    Preempted,
)
from hpcjax.core.files import read_object, replacing, write_json
from hpcjax.runs import build, code, places, record_age, table_records
from hpcjax.runs.tables import Table, TableResult

log = logging.getLogger(__name__)
# In a checkout: of which kernels on which device the tests have passed.
KERNELS_PASSED = pathlib.PurePath("tests/kernels/passed.json")


class KernelsWrong(HpcjaxError):
    """A kernel's numbers are wrong on this device: its times would mean nothing."""

    exit_code = 70


def check_kernels(seconds: float) -> str:
    """Runs the tests with the marker `gpu`, of a checkout; returns their last line.

    That they passed is kept beside them: kernels and tests that are still the same are
    not tested again on the same kind of device.
    """
    source = places.checkout()
    if source is None or not (source / "tests").is_dir():
        raise ConfigError("the kernels' tests are in a checkout of the project only")
    wanted = {"code": _digest_kernels(source), "device": describe_device()}
    passed = source / KERNELS_PASSED
    held = read_object(passed) if passed.exists() else {}
    if {name: held.get(name) for name in wanted} == wanted:
        return f"{held['result']}, before"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/kernels"]
    try:
        done = subprocess.run(
            command,
            cwd=source,
            env={**os.environ, "JAX_PLATFORMS": "cuda"},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise KernelsWrong(
            f"the kernels' tests took more than {seconds:.0f} s"
        ) from error
    last = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()[-1]
    if done.returncode:
        raise KernelsWrong(f"the kernels' tests fail here: {last}\n{done.stdout}")
    write_json(passed, {**wanted, "result": last})
    return last


def _digest_kernels(source: pathlib.Path) -> str:
    """Returns a digest of the kernels and of their tests."""
    tests = sorted((source / "tests/kernels").glob("*.py"))
    texts = [
        code.of_package("hpcjax.kernels").encode(),
        *(t.read_bytes() for t in tests),
    ]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def write_archive(
    archive: pathlib.Path, tables: Iterable[Table], tier: str, root: pathlib.Path
) -> None:
    """Writes the records of tables, and that kernels passed, into one zip file.

    From a machine that is given back one file is easily fetched; unpacked in a checkout
    it puts each record where it belongs.
    """
    paths = [table_records.record_path(table, tier, root) for table in tables]
    source = places.checkout()
    paths += [source / KERNELS_PASSED] if source else []
    with replacing(archive) as temporary, zipfile.ZipFile(temporary, "w") as file:
        for path in filter(pathlib.Path.exists, paths):
            ours = source if source and path.is_relative_to(source) else root
            file.write(path, path.relative_to(ours))


def wanted_first(
    tables: Sequence[Table], tier: str, root: pathlib.Path
) -> tuple[Table, ...]:
    """Returns the tables that are to be made, most wanted first.

    Those without a record come first, then those whose record is of older code or
    another kind of device; of equals the shortest. What today's code has recorded on
    this kind of device is left out.
    """
    ranked = []
    for table in tables:
        minutes = table.tier(tier).minutes
        try:
            record = table_records.read_record(table, tier, root)
            table_records.require_comparable(record)
        except (ConfigError, DataFormatError):
            missing = not table_records.record_path(table, tier, root).exists()
            ranked.append((not missing, minutes, table.id, table))
            continue
        if record_age.find_age(record, root).age != "this code":
            ranked.append((True, minutes, table.id, table))
    return tuple(table for *_, table in sorted(ranked, key=lambda each: each[:3]))


def make_within(
    minutes: float,
    tables: Sequence[Table],
    tier: str,
    root: pathlib.Path,
    *,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> Iterator[tuple[Table, TableResult | None, str]]:
    """Makes and records tables while there is time for the next one.

    Each record is written as its table ends. Called again, it goes on with what is
    missing. A table that fails does not keep the others from being made, but a signal,
    a full disk and code that changes meanwhile do.

    Yields:
      Table, its result or None, and why there is none.
    """
    end = clock() + 60 * minutes
    for table in tables:
        takes, left = table.tier(tier).minutes, (end - clock()) / 60
        if takes > left:
            yield table, None, f"takes {takes:g} min, and {left:.1f} are left"
            continue
        try:
            made = build.build_table(
                table.id, root=root, tier=tier, record=True, fresh=True, **options
            )
        except (Preempted, DiskFull, code.CodeChanged):
            raise
        except Exception as error:
            log.exception("%s could not be made", table.id)
            yield table, None, f"{type(error).__name__}: {error}"
            continue
        yield table, made, ""


def describe_device() -> str:
    """Returns the devices of this machine in words, such as `1 NVIDIA H200`."""
    kinds = provenance.collect(devices=True)["devices"] or {}
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"
