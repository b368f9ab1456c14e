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
from hpcjax.runs.sweeps.study import Study, Trial, open_study

log = logging.getLogger(__name__)
_BUSY = 2.0


def work(name: str, root: pathlib.Path) -> int:
    """Runs trials of a sweep until there is none to take, or its driver is gone.

    A trial that fails does not stop the worker. Only a full disk or a signal, which
    would stop every run, does; the trial is then put back. So does a result without the
    constraint's variable, which no run will have.

    Args:
      name: of the sweep.
      root: folder that holds `sweeps/` and `runs/`.

    Returns:
      The number of trials that it has finished.

    Raises:
      DiskFull: no room for a run.
      NoConstraint: the result has no variable of the constraint.
      Preempted: it was told to stop.
    """
    study = open_study(name, root)
    parent, ended = os.getppid(), 0
    with study.show_alive():
        while os.getppid() == parent:
            trial = study.take()
            if trial is None:
                break
            try:
                attempt(study, trial, root)
            # Another sweep, or a table, holds the run of the same config.
            except RunBusy as error:
                log.warning("put back: %s", error)
                study.put_back(trial)
                time.sleep(_BUSY)
                continue
            except (Preempted, KeyboardInterrupt, DiskFull):
                study.put_back(trial)
                raise
            ended += 1
    return ended


def attempt(study: Study, trial: Trial, root: pathlib.Path) -> None:
    """Runs one trial and records its value or its error."""
    texts = study.sweep.texts(trial.point)
    try:
        run = execute.ensure(study.sweep.config, texts, root=root, quiet=True)
        if run.status == "diverged":
            study.tell(trial, math.inf, run.id, "diverged")
        else:
            sweep = study.sweep
            bound = sweep.subject_to
            kept = None if bound is None else read_constraint(run, bound)
            study.tell(trial, judge_run(run, sweep.by), run.id, constraint=kept)
    except (Preempted, DiskFull, RunBusy):
        raise
    except NoConstraint as error:
        study.fail(trial, str(error))
        raise
    except HpcjaxError as error:
        study.fail(trial, str(error))
    except Exception as error:
        log.exception("trial with %s failed", texts)
        study.fail(trial, "".join(traceback.format_exception_only(error)).strip())


def judge_run(run: directory.RunDirectory, by: str) -> float:
    """Returns the least finite value of a variable of a run's result.

    Raises:
      HpcjaxError: the result has no such variable, or no finite value of it.
    """
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
    """Returns a scalar of a run's result, or the last value of a column.

    Raises:
      NoConstraint: the result has no such variable, or of more dimensions.
      HpcjaxError: it is not finite.
    """
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
