"""A network in blocks against one device, on eight simulated devices; 1 min on a core.

CosmoFlow on universes; `unet` on phantoms, in float64: in float32 rounding decides on
which side of zero a point of a ReLU is.
Expect: losses within 1e-5 and gradients within 1e-4 (`hpcjax table hybrid3dcnn/equal`).
"""

import dataclasses

from experiments.hybrid3dcnn.equal import Config
from hpcjax.data import PhantomVolumesConfig
from hpcjax.models import VolumeUNetConfig

base = Config()
unet = dataclasses.replace(
    base,
    model=VolumeUNetConfig(width_divisor=8, sync_axis="data"),
    dataset=PhantomVolumesConfig(patients=16),
    double=True,
)
