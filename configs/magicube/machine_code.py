"""The sparse kernels compiled for Hopper without a GPU; 2 s each.

`make kernels` installs what it needs.
Expect: wgmma for products of vectors of 8, never a saturating product, no spills
(`hpcjax table magicube/machine-code`).
"""

from experiments.magicube.machine_code import Config

needs = ("triton",)
base = Config()
sddmm = Config(kernel="sddmm")
plain = Config(kernel="plain")
