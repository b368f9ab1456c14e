"""SmolLM2-135M continues a text; 10 s on 2 cores, most of it reading and compiling.

Needs `hpcjax data fetch smollm2`. `hpcjax run lm/generate --prompt "Once upon a time"`.
Expect: English that goes on with the prompt, about 40 tokens a second on 2 cores.
"""

import dataclasses

from experiments.lm.generate import Config
from hpcjax.inference import Sampler

needs = ("smollm2",)

sampled = Config()
greedy = dataclasses.replace(sampled, sampler=Sampler(temperature=0.0))
base = sampled
smoke = {"model": "random", "max_new_tokens": "4", "prompt": "ab"}
