"""Small sweeps over the curves paper, run without processes."""

from hpcjax.runs import sweeps
from hpcjax.runs.sweeps import worker


def sweep_of(config="curves/plain", **options):
    varied = options.pop("varied", {"lr": "0.01,0.1,1.0", "wd": "0.25,0.5"})
    axes, fixed = sweeps.parse(varied)
    return sweeps.Sweep(config=config, axes=tuple(axes), overrides=fixed, **options)


def in_process(name, root, index):
    """A launcher without processes, for what is not about them."""
    worker.work(name, root)
    return Ended()


class Ended:
    def done(self):
        return True

    def result(self):
        return 0

    def cancel(self):
        pass


def run(sweep, root, **options):
    options = {"launcher": in_process, "quiet": True, **options}
    return sweeps.run_sweep(sweep, root=root, **options)


def run_ids(root):
    return sorted(path.parent.name for path in root.glob("runs/*/config.json"))


def abandon(study):
    """Takes a trial as a process does that dies then."""
    with study.take() as trial:
        return trial


def take_all(study):
    """Takes all trials, and ends none; returns their numbers, in order."""
    with study.take() as trial:
        if trial is None:
            return []
        return [trial.cell, *take_all(study)]
