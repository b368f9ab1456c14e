"""Sweeps: one config under many overrides, by many workers, one labelled result.

`axes` says what is varied and which points are visited, `study` keeps on disk which
trial is whose, `worker` runs trials until none is left, `launchers` start workers here,
on a Ray cluster or under Slurm, `driver` starts and watches them, and `gather` makes
one dataset of what came out.
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
