"""DLRM whose table of 520,000 rows is behind a link of 80 Mbit/s; half a minute a run.

Expect: look-ahead by 16 batches waits for almost nothing, takes less than half the time
of a step without a cache, and less than static hot rows and LRU of as many rows; losses
and table are those of training the whole table (`hpcjax table bagpipe/lookahead`).
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

base = Config(
    dataset=ClicksConfig(examples=20_000, tables=26, rows=20_000),
    model=DlrmConfig(bottom=(256, 64), top=(256, 128)),
    optimizer=RowAdagradConfig(lr=0.02),
    state=SIXTEEN,
    train=TrainConfig(steps=64, batch_size=256, eval_every=64, checkpoint_every=0),
)
near = replace(base, state=replace(SIXTEEN, lookahead=1, capacity=6_656))
short = replace(base, state=replace(SIXTEEN, lookahead=4, capacity=7_382))
far = replace(base, state=replace(SIXTEEN, lookahead=32, capacity=21_914))
no_cache = replace(base, state=replace(SIXTEEN, policy="none"))
static_hot = replace(base, state=replace(SIXTEEN, policy="static_hot"))
lru = replace(base, state=replace(SIXTEEN, policy="lru"))
whole = replace(base, state=None)
evict_first = replace(base, evict_first=True)
