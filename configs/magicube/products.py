"""Products of sparse integers in all pairs of precisions; seconds.

Expect: no wrong entry; at most 0.53 of the bytes in 4 bits that there are in 8
(`hpcjax table magicube/products`).
"""

from experiments.magicube.products import Config

base = Config()
