"""Sweeps: one config with many overrides, run by many workers, with one result.

`axes` defines what is varied and which points are visited, `adaptive` chooses points by
results, `study` keeps the state of trials on disk, `worker` runs trials until none is
left, `launchers` start workers here, on a Ray cluster or under Slurm, `driver` starts
and watches them, and `gather` collects the results in one dataset.
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
