"""Errors of k-means over SmolLM2's heads for every k, and k of each layer; 1 min.

Chapters of the King James Bible, their first 64 tokens. Needs
`hpcjax data fetch smollm2 kjv`. The run's folder gets `plan.json` in the authors' form.
Expect: 7 to 9 clusters of 9 heads by the threshold, 2 to 5 by the knee
(`hpcjax table chai/elbow`).
"""

import dataclasses

from experiments.chai.elbow import Config

needs = ("smollm2", "kjv")

kjv = Config()
python = dataclasses.replace(kjv, corpus="python-library")
base = kjv
