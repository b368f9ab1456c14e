"""A ResNet-8 of width 8 on digits, pruned at once or by rewinding; 1 min on 2 cores.

Fixed before any run: no rate, damping or block is tuned.
Expect: at 80 % WoodFisher's loss is below that of magnitude in all of five seeds, and a
rewound ticket of 90 % is no half point below its mask on other initial weights
(`hpcjax table sparsity/one-shot`).
"""

from experiments.sparsity.one_shot import Config

base = Config()
