"""SmolLM2 writes 32 tokens, our decoding against transformers'; 3 min on 2 cores.

Needs `hpcjax data fetch smollm2`, torch and transformers.
Expect: half of transformers' time on the same cores, no token that differs
(`hpcjax table lm/decoding`).
"""

import dataclasses

from experiments.lm.decoding import Config

needs = ("smollm2", "torch")

one = Config()
eight = dataclasses.replace(one, batch=8)
one_core = dataclasses.replace(one, one_core=True)
eight_one_core = dataclasses.replace(eight, one_core=True)
base = one
smoke = {"peer": "false"}  # which may not be installed
