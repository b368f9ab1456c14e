"""DistMult on WN18RR whose table is on disk, by COMET and BETA; half a minute a run.

86,835 links of 40,943 synsets, whose files you have to put into the data root. A
quarter of the rows are in memory while steps are taken, five epochs.
Expect: losses, table and MRR of the same order in memory, to the bit, and the bytes of
the order's swaps (`hpcjax table marius/disk`).
"""

from dataclasses import replace

from configs.marius import links
from experiments.marius.disk import Config
from hpcjax.train import RowCacheConfig

EPOCHS = 5
DISK = RowCacheConfig(policy="partitions", store="disk")
SLOW = replace(DISK, rate=16e6)  # a group of partitions in 0.16 s


def _of(run, epochs=EPOCHS, **given):
    steps = run.train.steps * epochs // links.EPOCHS
    own = replace(run.train, steps=steps, eval_every=steps)
    parts = {name: getattr(run, name) for name in ("dataset", "model", "optimizer")}
    return Config(**parts, train=own, **given)


base = comet = _of(links.comet, state=DISK)
comet_memory = _of(links.comet)
beta = _of(links.beta, state=DISK)
beta_memory = _of(links.beta)
evict_first = replace(comet, evict_first=True)
# An epoch of paced steps behind a slow link.
waits = _of(links.comet, 1, state=SLOW, pace=0.1)
ahead = replace(waits, state=replace(SLOW, prefetch=8))
lru = _of(links.comet, 1, state=RowCacheConfig(policy="lru", capacity=16 * 640))
spare = replace(waits, state=replace(SLOW, capacity=24 * 640))
