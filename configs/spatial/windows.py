"""Convolutions of a cube in eight blocks; half a minute a run of 2 cores.

Expect: bytes of halos by the rule, and outputs and slopes of one device (`hpcjax table
spatial/halos`).
"""

import dataclasses

from experiments.spatial.windows import Config

base = Config()
cornerless = dataclasses.replace(base, halos="no corners")
