"""SmolLM2 with clusters of heads in its last 15 of 30 layers; a minute on 2 cores.

Text: the King James Bible, passages of 96 tokens that no calibration has seen. Needs
`hpcjax data fetch smollm2 kjv`. Its heads share keys: they are repeated for each first.
`spatten`, `dejavu` and `oracle` leave heads out instead, as many as have no cluster of
their own.
Expect: perplexity 26.1 of the dense model, 32 with 6 clusters for 9 heads, 37 with 6
random ones (`hpcjax table chai/quality`).
"""

import dataclasses

from experiments.chai.experiment import Config

needs = ("smollm2", "kjv")

online = Config()
dense = dataclasses.replace(online, method="dense")
static = dataclasses.replace(online, method="static")
static_python = dataclasses.replace(static, calibration="python-library")
random = dataclasses.replace(online, method="random")
spatten = dataclasses.replace(online, method="spatten")
dejavu = dataclasses.replace(online, method="dejavu")
oracle = dataclasses.replace(online, method="oracle")
base = online
