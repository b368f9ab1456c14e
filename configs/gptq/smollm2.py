"""The first 6 of SmolLM2's 30 blocks at 3 bits; half a minute a run on 2 cores.

Calibration and evaluation: chapters of the King James Bible, other ones each. Needs
`hpcjax data fetch smollm2` and `hpcjax data fetch kjv`. `all_blocks` takes all 30.
Expect: perplexity 19.9 of the model itself, 35.5 by rounding, 25.7 by GPTQ
(`hpcjax table gptq/quality`).
"""

import dataclasses

from experiments.gptq.experiment import Config
from hpcjax.compress import GptqOptions

needs = ("smollm2", "kjv")

gptq = Config()
fp32 = dataclasses.replace(gptq, method="none")
rtn = dataclasses.replace(gptq, method="rtn")
act_order = dataclasses.replace(gptq, gptq=GptqOptions(act_order=True))
sparsegpt = dataclasses.replace(gptq, method="sparsegpt")
all_blocks = dataclasses.replace(gptq, blocks=None)
base = gptq
