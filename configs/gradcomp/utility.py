"""Setups in which compressing gradients pays, by a model from measured parts; 10 s.

`calibration` names the file with the times of a device: `hpcjax run
gradcomp/calibration` makes one.
Expect: the share of setups that pay falls with the bandwidth and rises with the speed
of compute (`hpcjax table gradcomp/utility`).
"""

from experiments.gradcomp.utility import Config

# Cores compute slowly: what a CPU saves, it saves on slow links.
cpu = Config(gbit_per_s=(0.1, 1.0, 10.0, 25.0, 100.0, 200.0, 400.0))
base = cpu
