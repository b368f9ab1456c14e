"""Monthly sea-surface temperatures as a network; 2 to 4 minutes a run on 2 cores.

Needs `hpcjax data fetch sst-anomaly`. `:sz3`, `:dct` and `:eof` compress it otherwise,
at many sizes, and take a minute at most.
Expect: at a ratio of 280 or more the network's weighted RMSE is at most 0.70 K and at
most 0.9 of SZ3's on the field as it is (`hpcjax table fields/sst`).
"""

import dataclasses

from experiments.fields.sst import Config

needs = ("sst-anomaly",)

network = Config()
sz3 = dataclasses.replace(network, codec="sz3")
dct = dataclasses.replace(network, codec="dct")
eof = dataclasses.replace(network, codec="eof")
base = network
