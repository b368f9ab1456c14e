"""DLRM whose table of 520,000 rows is behind a link of 80 Mbit/s; half a minute a run.

Expect: prefetching is what counts; LRU that fetches the rows of the next batch while
one is trained on is as fast as look-ahead by 16 batches, but where a request takes
longer than a step; losses and table are those of training the whole table
(`hpcjax table bagpipe/lookahead`).
"""

from dataclasses import replace

from experiments.bagpipe.lookahead import Config
from hpcjax.data import ClicksConfig
from hpcjax.models import DlrmConfig
from hpcjax.optim import RowAdagradConfig
from hpcjax.train import RowCacheConfig, TrainConfig

# As many rows as look-ahead by 16 batches needs; the others as many as theirs do, but
# at least the ids of a batch.
SIXTEEN = RowCacheConfig(lookahead=16, capacity=13_746, rate=10e6, latency=5e-4)
LRU, HOT = replace(SIXTEEN, policy="lru"), replace(SIXTEEN, policy="static_hot")

base = Config(
    dataset=ClicksConfig(examples=20_000, tables=26, rows=20_000),
    model=DlrmConfig(bottom=(256, 64), top=(256, 128)),
    optimizer=RowAdagradConfig(lr=0.02),
    state=SIXTEEN,
    train=TrainConfig(steps=96, batch_size=256, eval_every=96, checkpoint_every=0),
)
near = replace(base, state=replace(SIXTEEN, lookahead=1, capacity=6_656))
short = replace(base, state=replace(SIXTEEN, lookahead=4, capacity=7_382))
far = replace(base, state=replace(SIXTEEN, lookahead=32, capacity=21_914))
no_cache = replace(base, state=replace(SIXTEEN, policy="none"))
static_hot = replace(base, state=HOT)
static_hot_1 = replace(base, state=replace(HOT, prefetch=1))
static_hot_2 = replace(base, state=replace(HOT, prefetch=2))
lru = replace(base, state=LRU)
lru_1 = replace(base, state=replace(LRU, prefetch=1))
lru_2 = replace(base, state=replace(LRU, prefetch=2))
whole = replace(base, state=None)
evict_first = replace(base, evict_first=True)
