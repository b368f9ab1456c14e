"""First token and 32 tokens behind prompts of 256 to 8,192; 8 min on 2 cores.

Random weights, whose time is that of any others. `llama7b` has LLaMA-7B's shapes and
the authors' list of clusters, params7b, in bfloat16, and needs a GPU with 24 GB.
Expect: with 4 clusters of 16 heads, the first token of a long prompt in less time
(`hpcjax table chai/latency`).
"""

from experiments.chai.latency import Config
from hpcjax.models import LLAMA, CausalLmConfig

small = Config()
llama7b = Config(
    model=CausalLmConfig(
        depth=32, width=4096, heads=32, mlp_width=11008, options=LLAMA
    ),
    vocabulary=32000,
    compute="bfloat16",
    dense_layers=18,
    prompts=(256, 1024, 2048, 4096, 8192),
)
base = small
