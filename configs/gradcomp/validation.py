"""Steps of 2 and 4 processes over links, predicted and measured; 5 min on 2 cores.

`:full` has 2, 4 and 8 processes and more links, half an hour.
Expect: predictions off by 15 % in the median and by 35 % at most (`hpcjax table
gradcomp/validation`).
"""

import dataclasses

from experiments.gradcomp.validation import Config

ci = Config()
full = dataclasses.replace(
    ci,
    processes=(2, 4, 8),
    mbit_per_s=(25.0, 50.0, 100.0, 400.0, 3200.0),
    repetitions=5,
)
base = ci
