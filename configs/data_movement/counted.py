"""Words that an encoder layer of interpreted kernels reads and writes; 20 s a run.

`make kernels` installs what it needs.
Expect: 0.842 of the unfused list's words with stored masks, 0.745 with masks drawn
again (`hpcjax table data_movement/kernels`).
"""

from experiments.data_movement.counted import Config

needs = ("triton",)
base = Config()
