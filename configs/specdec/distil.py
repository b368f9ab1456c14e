"""Drafts for SmolLM2-135M: pruned children, distilled on it; 5 min a run on 2 cores.

Needs `hpcjax data fetch smollm2 kjv`. wide4 and deep8 have equally many parameters in
their layers. A draft is kept below the data root, and the tables use it.
Expect: wide4 has 0.3 of its first tokens accepted and 1.5 tokens an iteration, of at
most 7 (`accepted` and `emitted` of the result).
"""

from experiments.specdec.drafts import DraftConfig
from experiments.specdec.experiment import Config

needs = ("smollm2", "kjv")

wide4 = Config(draft=DraftConfig(layers=4))
wide2 = Config(draft=DraftConfig(layers=2))
deep8 = Config(draft=DraftConfig(layers=8, heads=3, kv_heads=3, mlp_width=768))
base = wide4
