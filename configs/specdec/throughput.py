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
_PRUNED = ("target", "context", "batch", "steps", "calibration")
smoke = {
    **{
        f"{place}.{key}": distil.smoke[f"draft.{key}"]
        for place in ("first", "second", "third")
        for key in _PRUNED
    },
    "first.layers": "1",
    "second.layers": "1",
    "third.layers": "1",
    "third.heads": "2",
    "third.kv_heads": "2",
    "third.mlp_width": "8",
    "aheads": "[1]",
    "prompts": "1",
    "length": "4",
    "tokens": "16",
    "repetitions": "2",
    "inner": "1",
}
