"""The runs of a folder at a glance, and removing those that nobody needs."""

import contextlib
import dataclasses
import pathlib
import shutil
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from hpcjax.core.errors import ConfigError, DataFormatError, RunBusy, nearest
from hpcjax.runs import code, directory, discover, lock, overview
from hpcjax.runs import tags as tagging

STATES = ("running", "interrupted", "preempted", "failed", "diverged", "done")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A run as a line of a list.

    Attributes:
      id: its name below `runs/`.
      title: its config's name.
      state: how it stands, one of `STATES`, or "damaged" if its files do not tell.
      tags: that it was given when it was started.
      scores: of its last validation, without "val_"; none if it has had none.
      steps: up to which it has saved; 0 if it does not train.
      made_by: "this code", "older code" or "unknown".
      days: since its config was written.
      bytes: of all its files.
      path: its folder.
      verdicts: committed tables that were made of it, and how many of their claims
        hold, such as "jorge/quickstart 1 of 1".
    """

    id: str
    title: str
    state: str
    tags: tuple[str, ...]
    scores: Mapping[str, float]
    steps: int
    made_by: str
    days: float
    bytes: int
    path: pathlib.Path
    verdicts: tuple[str, ...] = ()


def list_runs(
    root: pathlib.Path,
    paper: str | None = None,
    state: str | None = None,
    tags: Collection[str] = (),
) -> list[Entry]:
    """Returns the runs below `root`, oldest first.

    Args:
      root: folder that holds `runs/`.
      paper: only those of this paper's configs.
      state: only those that stand so, see `Entry`.
      tags: only those that have all of these.

    Raises:
      ConfigError: an unknown state.
    """
    allowed = (*STATES, "damaged")
    if state not in (None, *allowed):
        raise ConfigError(f"unknown state {state!r}{nearest(str(state), allowed)}")
    verdicts = _read_verdicts(root)
    entries = (
        dataclasses.replace(_describe(run, root), verdicts=verdicts.get(run.id, ()))
        for run in directory.list_runs(root)
    )
    return [
        entry
        for entry in entries
        if (paper is None or entry.title.startswith(f"{paper}/"))
        and state in (None, entry.state)
        and {*tags} <= {*entry.tags}
    ]


def delete(entries: Iterable[Entry]) -> None:
    """Removes runs, of which a killed process leaves whole ones or such as are listed.

    Raises:
      RunBusy: a living process holds one; none is removed then.
    """
    chosen = list(entries)
    held = [entry.id for entry in chosen if lock.is_held(entry.path)]
    if held:
        raise RunBusy(f"a process holds {', '.join(held)}: nothing was deleted")
    for entry in chosen:
        # The config goes last: a folder with a config counts as a run.
        for path in sorted(entry.path.iterdir(), key=_is_config):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        entry.path.rmdir()


def _is_config(path: pathlib.Path) -> bool:
    return path.name == "config.json"


def _describe(run: directory.RunDirectory, root: pathlib.Path) -> Entry:
    title, state, made_by = "", "damaged", "unknown"
    tags: tuple[str, ...] = ()
    scores: dict[str, float] = {}
    with contextlib.suppress(DataFormatError, OSError, RecursionError):
        title = str(run.read_config().get("name", ""))
        tags, scores = tagging.read_tags(run.path), _last_scores(run)
        state = run.standing
        made_by = _age(run, run.sessions(), root)
    own = [path for path in run.path.rglob("*") if path.is_file()]
    begun = (run.path / "config.json").stat().st_mtime
    return Entry(
        id=run.id,
        title=title,
        state=state,
        tags=tags,
        scores=scores,
        steps=run.steps_taken(),
        made_by=made_by,
        days=(time.time() - begun) / 86400,
        bytes=sum(path.stat().st_size for path in own),
        path=run.path,
    )


def _read_verdicts(root: pathlib.Path) -> dict[str, tuple[str, ...]]:
    """Returns what committed tables say, by the ids of the runs they were made of."""
    found: dict[str, tuple[str, ...]] = {}
    for record in overview.read_records(root):
        with contextlib.suppress(LookupError, TypeError):
            held = [claim["holds"] for claim in record["claims"].values()]
            said = f"{record['table']} {sum(held)} of {len(held)}"
            for run in {run["id"] for run in record["runs"]}:
                found[run] = (*found.get(run, ()), said)
    return found


def _last_scores(run: directory.RunDirectory) -> dict[str, float]:
    for record in reversed(run.newest_records()):
        names = [name for name in record if name.startswith("val_")]
        if names:
            return {name.removeprefix("val_"): record[name] for name in names}
    return {}


def _age(
    run: directory.RunDirectory, sessions: Sequence[dict], root: pathlib.Path
) -> str:
    """Returns which code made a run; "older code" also where its config is gone."""
    try:
        now = code.of_run(discover.load(run.config_name, {}, root).config)
    except ConfigError:
        return "older code"
    ages = {code.age(session.get("code"), now) for session in sessions}
    return next(age for age in ("unknown", "older code", "this code") if age in ages)
