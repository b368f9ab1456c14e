"""A sparse student of a sparse linear teacher whose weights are known; 3 s a run.

Expect: growth by gradients finds the teacher's weights, growth by chance about half of
them, and masks that stay a tenth (`hpcjax table sparsity/support`).
"""

from experiments.sparsity.support import Config

base = Config()
