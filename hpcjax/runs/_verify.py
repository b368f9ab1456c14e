"""Checking that a run directory can be read and is consistent; changes nothing."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import xarray as xr
from rich.console import Group, RenderableType
from rich.text import Text

from hpcjax.core import files
from hpcjax.core.errors import CheckpointCorrupt, DataFormatError
from hpcjax.hostcomm import load_trace
from hpcjax.runs import code, directory, discover, lock, results, tags
from hpcjax.runs import config as configs
from hpcjax.runs.frames import Frame
from hpcjax.runs.metrics import Metrics
from hpcjax.runs.run_directory import CHECKSUMS, WORKERS

Verdict = Literal["ok", "note", "foreign", "bad"]
_CHECKPOINTS = "checkpoints"
_LACKING = "no manifest: damaged, or of another program; loads only with --trust"
_TRUSTED = "no manifest: was loaded with --trust"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of checking one part of a run directory.

    Attributes:
      part: file or checkpoint, as a path inside the run directory.
      verdict: `bad` for damage; `foreign` for a checkpoint without a manifest, which
        cannot be verified, in a run with `--trust`; `note` for what is worth knowing.
      detail: what it contains, or what is wrong.
    """

    part: str
    verdict: Verdict
    detail: str


def verify(run_id: str, *, root: pathlib.Path | None = None) -> list[Finding]:
    """Reads everything that a run directory holds.

    It reads all records, the whole result and all arrays of all checkpoints, and of the
    newest whole one the rows that are on disk, unless a process writes them now.
    Checkpoints are compared with their manifests, the config with the recorded digest,
    and the records with the checkpoints that are whole; a run that is done must have
    records up to the last step of its result. A run that is done or has diverged must
    have its files as they were when it ended.

    Args:
      run_id: the folder's name, or its last six digits where they are unique.
      root: folder that holds `runs/`; default the working directory.

    Returns:
      One finding for each part; nothing is wrong unless one has the verdict `bad`.

    Raises:
      ConfigError: no such run.

    Examples:
      `[f for f in runs.verify("0d3aa7") if f.verdict == "bad"]`
    """
    root = root or pathlib.Path.cwd()
    run = _open(root, run_id)
    checkpoints = [*_checkpoints(run)]
    findings = [
        _look("config.json", lambda: _config(run, root)),
        _look("provenance.json", lambda: _provenance(run)),
        _look("metrics.jsonl", lambda: _metrics(run, checkpoints)),
        _look("status", lambda: _status(run)),
        _look("result.nc", lambda: _result(run)),
    ]
    findings += [*checkpoints, *_traces(run), *_workers(run)]
    findings += [*_others(run, {f.part for f in findings})]
    return [*_sealed(run, findings)]


def _sealed(
    run: directory.RunDirectory, findings: Sequence[Finding]
) -> Iterator[Finding]:
    """Yields the findings, bad where a file is not what it was when the run ended."""
    if _word(run) not in ("done", "diverged"):
        yield from findings
        return
    part, changed = CHECKSUMS, {}
    try:
        changed = run.changed()
    except DataFormatError as error:
        yield Finding(part=part, verdict="bad", detail=str(error))
    else:
        if changed is None:
            text = "none: by an earlier version; changed numbers would not be noticed"
            yield Finding(part=part, verdict="note", detail=text)
        else:
            text = f"{len(changed)} files differ" if changed else "all files as sealed"
            yield Finding(part=part, verdict="ok", detail=text)
    for finding in findings:
        how = (changed or {}).pop(finding.part, None)
        if how is None or finding.verdict == "bad":
            yield finding
        else:
            yield dataclasses.replace(finding, verdict="bad", detail=how)
    for name, how in (changed or {}).items():
        yield Finding(part=name, verdict="bad", detail=how)


def exit_status(findings: Sequence[Finding]) -> int:
    """Returns 5 when a checkpoint is bad, 3 when only other files are, else 0."""
    bad = [f.part for f in findings if f.verdict == "bad"]
    if any(_CHECKPOINTS in pathlib.PurePath(part).parts for part in bad):
        return CheckpointCorrupt.exit_code
    return DataFormatError.exit_code if bad else 0


def render(findings: Sequence[Finding]) -> RenderableType:
    """Returns the findings as a table."""
    rows = [(f.part, f.verdict, f.detail) for f in findings]
    bad = [f.part for f in findings if f.verdict == "bad"]
    end = f"Bad: {', '.join(bad)}" if bad else "Nothing is damaged."
    return Group(Frame("", ("part", "verdict", "what"), rows), Text(end))


def _open(root: pathlib.Path, run_id: str) -> directory.RunDirectory:
    """Opens a run's folder, also without a config, which is then a finding."""
    if run_id not in {path.name for path in (root / "runs").glob("*/")}:
        return directory.open_run(root, run_id)
    return directory.RunDirectory(files.inside(root, "runs", run_id))


def _look(part: str, read: Callable[[], str | Finding]) -> Finding:
    """Returns the finding of `read`, or one that is `bad` with the error it raises."""
    try:
        finding = read()
    except Exception as error:  # whatever a reader makes of damaged bytes
        lines = str(error).splitlines() or [""]
        known = isinstance(error, ValueError | OSError)
        kind = "" if known and lines[0] else f"{type(error).__name__}: "
        return Finding(part=part, verdict="bad", detail=kind + lines[0])
    if isinstance(finding, Finding):
        return finding
    return Finding(part=part, verdict="ok", detail=finding)


def _word(run: directory.RunDirectory) -> str:
    try:
        return run.status
    except ValueError:
        return "unknown"


def _config(run: directory.RunDirectory, root: pathlib.Path) -> str:
    run.read_config()  # names what it must be, where it is not an object
    loaded = discover.load(run.config_name, {}, root)
    made = ""
    with contextlib.suppress(DataFormatError, RecursionError):  # told for its own file
        now = code.of_run(loaded.config)
        ages = {code.age(session.get("code"), now) for session in run.sessions()}
        made = f", of {' and '.join(sorted(ages))}"
    return f"{loaded.title}, digest {configs.digest(loaded.config)}{made}"


def _provenance(run: directory.RunDirectory) -> str | Finding:
    part, ended = "provenance.json", _word(run) in ("done", "diverged")
    if not (run.path / part).exists() and not ended:
        return "none yet"
    sessions = run.sessions()
    commits = dict.fromkeys(str(s.get("git_commit"))[:10] for s in sessions)
    digest, ran = configs.digest_json(run.read_config()), sessions[-1]
    if ran.get("config_digest", digest) != digest:
        text = f"of config {ran['config_digest']}, and config.json is {digest}"
        # If it was resumed with other steps and killed at once, config.json is new and
        # the session not yet written.
        return Finding(part=part, verdict="bad" if ended else "note", detail=text)
    return f"sessions: {len(sessions)}, commit {', '.join(commits)}"


def _metrics(
    run: directory.RunDirectory, checkpoints: Sequence[Finding]
) -> str | Finding:
    """Compares records with the result and the whole checkpoints.

    A run goes on before a damaged one, and may have taken other steps since.
    """
    part = "metrics.jsonl"
    path = run.path / part
    whole = [pathlib.Path(f.part) for f in checkpoints if f.verdict == "ok"]
    whole = [path for path in whole if path.name.isdecimal()]  # no rows beside them
    due = max([*(int(found.name) for found in whole), _steps(_history(run))])
    if not path.exists():
        if due:
            raise DataFormatError(f"missing, and the run has taken {due} steps")
        return "none"
    records = run.records()
    last = max((record["step"] for record in records), default=0)
    text = f"{len(records)} records, up to step {last}"
    if last < due:
        raise DataFormatError(f"{text}; the run has taken {due} steps")
    for found in whole:
        manifest = files.read_object(run.path / found / "MANIFEST.json")
        if mark := manifest["body"]["extra"].get("records"):
            Metrics(path).check(mark)
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        text += "; a last line is cut off and counts as not written"
        return Finding(part=part, verdict="note", detail=text)
    return text


def _history(run: directory.RunDirectory) -> xr.Dataset:
    """Returns the result of a run that is done, if it is the history of a training.

    Otherwise, or if it cannot be read, which is a finding about the file, the dataset
    is empty.
    """
    with contextlib.suppress(OSError, ValueError):
        dataset = results.read(run.path / "result.nc")
        if run.status == "done" and {"step", "lost_seconds"} <= {*dataset.variables}:
            return dataset
    return xr.Dataset({"compile_seconds": 0.0}, coords={"step": []})


def _steps(history: xr.Dataset) -> int:
    return int(history["step"].max()) if history["step"].size else 0


def _status(run: directory.RunDirectory) -> str | Finding:
    word = run.status
    if lock.is_held(run.path):
        text = f"{word}; a process holds the run: what is read here may change"
    elif word == "running":
        text = f"{run.standing}: it was killed and can be resumed"
    else:
        return word
    return Finding(part="status", verdict="note", detail=text)


def _result(run: directory.RunDirectory) -> str:
    path, word = run.path / "result.nc", _word(run)
    if not path.exists():
        if word == "done":
            raise DataFormatError("missing, and the status is done")
        return f"none: the run is {word}"
    dataset = results.read(path)
    source = dataset.attrs.get("source")
    if source not in results.SOURCES:
        raise DataFormatError(
            f"source must be one of {results.SOURCES}: got {source!r}"
        )
    json.loads(dataset.attrs["provenance"])
    sizes = ", ".join(f"{name} {size}" for name, size in dataset.sizes.items())
    return f"{source}: {len(dataset.data_vars)} variables; {sizes or 'scalars'}"


def _checkpoints(run: directory.RunDirectory) -> Iterator[Finding]:
    folder, history = run.path / _CHECKPOINTS, _history(run)
    last = _steps(history)
    # A compile time tells that it was our loop, which always saves the last step.
    if run.steps_taken() < last and float(history["compile_seconds"]) > 0:
        text = "missing, and the status is done"
        yield Finding(part=f"{_CHECKPOINTS}/{last}", verdict="bad", detail=text)
    if not folder.is_dir():
        return
    names = sorted(path.name for path in folder.iterdir())
    newest, rows = None, []
    if any(name.isdecimal() for name in names):
        from hpcjax import train  # starts JAX

        for step, held in train.examine_checkpoints(folder):
            part = f"{_CHECKPOINTS}/{step}"
            if held is None and _trusted(run):
                yield Finding(part=part, verdict="foreign", detail=_TRUSTED)
            elif held is None:
                yield Finding(part=part, verdict="bad", detail=_LACKING)
            elif isinstance(held, CheckpointCorrupt):
                yield Finding(part=part, verdict="bad", detail=str(held))
            else:
                size = sum(file.size for file in held.files.values())
                text = f"{len(held.leaves)} arrays, {size / 1e6:.3g} MB"
                newest = held
                yield Finding(part=part, verdict="ok", detail=text)
        # Rows of older ones may be gone, and those of a living run are being written.
        if newest is not None and not lock.is_held(run.path):
            rows = [*train.examine_rows(folder, newest)]
    for name, found in rows:
        bad = isinstance(found, Exception)
        part, verdict = f"{_CHECKPOINTS}/{name}", "bad" if bad else "ok"
        yield Finding(part=part, verdict=verdict, detail=str(found))
    known = {name.partition("/")[0] for name, _ in rows}
    for name in names:
        if not name.isdecimal() and name not in known:
            part = f"{_CHECKPOINTS}/{name}"
            yield Finding(part=part, verdict="note", detail=_leftover(run, name))


def _traces(run: directory.RunDirectory) -> Iterator[Finding]:
    """Yields what is to be said of the traces of workers in processes."""
    for path in sorted(run.path.glob("trace-*")):
        yield _look(path.name, lambda path=path: f"{load_trace(path).steps} steps")


def _workers(run: directory.RunDirectory) -> Iterator[Finding]:
    """Yields the findings of each worker in a process, whose folder is like a run's."""
    for folder in sorted((run.path / WORKERS).glob("*")):
        own = directory.RunDirectory(folder)
        kept = [*_checkpoints(own)]
        records = _look("metrics.jsonl", lambda own=own, kept=kept: _metrics(own, kept))
        for finding in (records, *kept, *_traces(own)):
            part = f"{WORKERS}/{folder.name}/{finding.part}"
            yield dataclasses.replace(finding, part=part)


def _trusted(run: directory.RunDirectory) -> bool:
    with contextlib.suppress(DataFormatError):
        return any(session.get("trusted") for session in run.sessions())
    return False


def _others(run: directory.RunDirectory, known: set[str]) -> Iterator[Finding]:
    for path in sorted(run.path.iterdir()):
        name = path.name
        if name in known or (name in (_CHECKPOINTS, WORKERS) and path.is_dir()):
            continue
        if name in (CHECKSUMS, tags.NAME):
            continue
        if name.startswith("log.") and path.suffix == ".txt":
            yield _look(name, lambda path=path: _lines(path))
        else:
            yield Finding(part=name, verdict="note", detail=_leftover(run, name))


def _lines(path: pathlib.Path) -> str:
    return f"{len(path.read_text(encoding='utf-8').splitlines())} lines"


def _leftover(run: directory.RunDirectory, name: str) -> str:
    held = lock.is_held(run.path)
    if name == "lock":
        return "of a living process" if held else "of a process that has ended"
    if name.startswith("."):
        return "being written" if held else "a write that was cut off; is not used"
    return "not checked"
