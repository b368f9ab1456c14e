"""Words that an exchange of 100 000 numbers sends, 1 % kept; seconds on 2 cores.

Expect: Ok-Topk stays below 6 k words whatever the number of members, while TopkA grows
with it (`oktopk/volume`); pooled cuts balance what the members receive wherever large
entries lie (`oktopk/balance`).
"""

import dataclasses

from experiments.oktopk.volume import Config
from hpcjax.collectives import (
    GaussianKConfig,
    GTopkConfig,
    OkTopkConfig,
    TopKConfig,
    TopkDsaConfig,
)

ok_topk = Config(exchange=OkTopkConfig(density=0.01))
top_k = dataclasses.replace(ok_topk, exchange=TopKConfig(density=0.01))
topk_dsa = dataclasses.replace(ok_topk, exchange=TopkDsaConfig(density=0.01))
gtopk = dataclasses.replace(ok_topk, exchange=GTopkConfig(density=0.01))
gaussian_k = dataclasses.replace(ok_topk, exchange=GaussianKConfig(density=0.01))
balance = dataclasses.replace(ok_topk, inputs="clustered", members=8, steps=3)
base = ok_topk
