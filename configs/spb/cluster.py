"""A simulated cluster under five policies; 20 s with 64 GPUs, a minute with 512.

Expect: jigsaw computes and switches 10 to 25 % less than gangs in order of arrival, and
saves nothing with k = 1 (`hpcjax table spb/cluster`). Another trace is
`trace=jobs.csv layout=csv`, or of Philly or PAI.
"""

import dataclasses

from experiments.spb.cluster import Config

base = Config()
large = dataclasses.replace(base, gpus=512, jobs=800, rate=1.2)
