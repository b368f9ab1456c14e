"""A token of SmolLM2 with room for 64 and for 2,048 in its cache; 2 min on 2 cores.

Needs `hpcjax data fetch smollm2`.
Expect: the same time within a tenth, as only the tokens there are read
(`hpcjax table lm/room`).
"""

from experiments.lm.room import Config

needs = ("smollm2",)

base = Config()
