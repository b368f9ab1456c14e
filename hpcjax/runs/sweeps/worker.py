"""A worker of a sweep: takes trials and runs them until none is left.

`python -m hpcjax.runs.sweeps.worker <name> <root>`; the driver starts them, on whatever
machine sees the folder.
"""

import logging
import math
import os
import pathlib
import signal
import sys
import time
import traceback
from dataclasses import replace

import numpy as np

from hpcjax.core.errors import (
    ConfigError,
    DiskFull,
    HpcjaxError,
    Preempted,
    RunBusy,
    nearest,
)
from hpcjax.runs import directory, execute, results
from hpcjax.runs.sweeps.axes import Constraint
from hpcjax.runs.sweeps.study import open_study
from hpcjax.runs.sweeps.sweep import Sweep, Trial

log = logging.getLogger(__name__)
_BUSY = 2.0


def work(name: str, root: pathlib.Path) -> None:
    """Runs trials of a sweep until there is none to take, or its driver is gone.

    A trial that fails does not stop the worker. Only a full disk or a signal, which
    would stop every run, does; the trial then waits for another worker. So does a
    result without the constraint's variable, which no run will have.

    Args:
      name: of the sweep.
      root: folder that holds `sweeps/` and `runs/`.

    Raises:
      DiskFull: no room for a run.
      NoConstraint: the result has no variable of the constraint.
      Preempted: it was told to stop.
    """
    study, parent = open_study(name, root), os.getppid()
    while os.getppid() == parent:
        with study.take() as trial:
            if trial is None:
                return
            waiting = replace(trial, status="waiting")
            try:
                study.write(attempt(study.sweep, trial, root))
            except RunBusy as error:  # of another sweep, or a table
                log.warning("trial %d waits: %s", trial.cell, error)
                study.write(waiting)
                time.sleep(_BUSY)
            except NoConstraint as error:
                study.write(replace(trial, status="failed", error=str(error)))
                raise
            except (Preempted, KeyboardInterrupt, DiskFull):
                study.write(waiting)
                raise


def attempt(sweep: Sweep, trial: Trial, root: pathlib.Path) -> Trial:
    """Runs one trial; returns it with its value or its error."""
    texts = sweep.texts(trial.point)
    try:
        run = execute.ensure(sweep.config, texts, root=root, quiet=True)
        if run.status == "diverged":
            return replace(trial, status="diverged", value=math.inf, run=run.id)
        bound = sweep.subject_to
        kept = None if bound is None else read_constraint(run, bound)
        value = judge_run(run, sweep.by)
        return replace(trial, status="done", value=value, run=run.id, constraint=kept)
    except (Preempted, DiskFull, RunBusy, NoConstraint):
        raise
    except HpcjaxError as error:
        told = str(error)
    except Exception as error:
        log.exception("trial with %s failed", texts)
        told = "".join(traceback.format_exception_only(error)).strip()
    # The text may contain anything, such as a path that is not UTF-8.
    clean = told.encode("utf-8", "backslashreplace").decode().replace("\0", "")
    return replace(trial, status="failed", error=clean)


def judge_run(run: directory.RunDirectory, by: str) -> float:
    """Returns the least finite value of a variable of a run's result."""
    dataset = execute.read_result(run)
    if by not in dataset:
        raise HpcjaxError(f"the result has no {by!r}: it has {[*dataset]}")
    least = results.least(dataset[by])
    if least == math.inf:
        raise HpcjaxError(f"the result has no finite {by!r}")
    return least


class NoConstraint(ConfigError):
    """No run of a sweep has the variable of its constraint."""


def read_constraint(run: directory.RunDirectory, constraint: Constraint) -> float:
    """Returns a scalar of a run's result, or the last value of a column."""
    dataset, name = execute.read_result(run), constraint.name
    if name not in dataset or dataset[name].ndim > 1:
        flat = [str(each) for each in dataset if dataset[each].ndim < 2]
        raise NoConstraint(
            f"{constraint}: the result has no such scalar or column"
            f"{nearest(name, flat)}"
        )
    last = float(np.atleast_1d(np.asarray(dataset[name], float))[-1:].sum())
    if not math.isfinite(last):
        raise HpcjaxError(f"the last {name!r} is not finite")
    return last


def main(name: str, root: str) -> int:
    """Runs a worker as a process; returns its exit status."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level="INFO")
    # Between trials there is nothing to save, and a signal ends the worker.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        work(name, pathlib.Path(root))
    except KeyboardInterrupt:
        return Preempted.exit_code
    except HpcjaxError as error:
        log.error("%s", error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
