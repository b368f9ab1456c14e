"""Selecting 2 % of VGG-16's gradient, or 1 % of BERT's: 1 min on a GPU, 3 on 2 cores.

Expect: on a GPU one pass with a known threshold is at least 5 times as fast as
`lax.top_k`, not measured yet (`hpcjax table oktopk/selection --tier gpu`).
"""

from experiments.oktopk.selection import Config

vgg = Config()
bert = Config(numbers=133_547_324, density=0.01)
base = vgg
