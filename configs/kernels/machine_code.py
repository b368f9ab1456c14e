"""GPU kernels compiled for Hopper without a GPU, and interpreted; 2 s each.

`make kernels` installs what it needs.
Expect: two values of a matrix are multiplied by one instruction, without a conversion
and without spills (`hpcjax table kernels/machine-code`).
"""

from experiments.kernels.machine_code import Config

needs = ("triton",)
base = Config()
several_rows = Config(kernel="several_rows")
plain_row = Config(kernel="plain_row")
attention = Config(kernel="attention")
selection = Config(kernel="selection")
