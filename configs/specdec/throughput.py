"""SmolLM2-135M with three drafts, measured and foretold; 20 min on 2 cores.

Needs `hpcjax data fetch smollm2 kjv`; makes the drafts of `specdec/distil` if they are
not there, 15 min more.
Expect: the model foretells what is measured; on two cores speculation does not pay
(`hpcjax table specdec/model`).
"""

from configs.specdec import distil
from experiments.specdec.throughput import Config

needs = ("smollm2", "kjv")

cpu = Config(
    first=distil.wide2.draft, second=distil.wide4.draft, third=distil.deep8.draft
)
base = cpu
