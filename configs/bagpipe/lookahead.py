"""DLRM whose table of 520,000 rows is behind a link of 80 Mbit/s; half a minute a run.

Expect: look-ahead by 16 batches waits for almost nothing, takes less than half the time
of a step without a cache, and less than static hot rows and LRU of as many rows; losses
and table are those of training the whole table (`hpcjax table bagpipe/lookahead`).
"""

from dataclasses import replace

from experiments.bagpipe.lookahead import Config

base = Config()
near = replace(base, lookahead=1)
short = replace(base, lookahead=4)
far = replace(base, lookahead=32)
no_cache = replace(base, policy="no_cache")
static_hot = replace(base, policy="static_hot")
lru = replace(base, policy="lru")
whole = replace(base, policy="whole")
evict_first = replace(base, evict_first=True)
