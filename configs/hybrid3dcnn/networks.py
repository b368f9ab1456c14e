"""Sizes of CosmoFlow and the 3-D U-Net, and memory of a step in blocks; 3 min.

`v2` is CosmoFlow's later form, for the table's negative controls.
Expect: 9,437,636 and 19,070,560 parameters, and at 8 blocks at most 0.15 of one
device's temporaries (`hpcjax table hybrid3dcnn/networks`).
"""

import dataclasses

from experiments.hybrid3dcnn.networks import Config
from hpcjax.models import CosmoFlowConfig

base = Config()
v2 = dataclasses.replace(
    base,
    model=CosmoFlowConfig(variant="v2"),
    widths=(256,),
    unet_width=32,
    blocks=(1,),
    block_width=16,
)
