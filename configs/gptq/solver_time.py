"""Our GPTQ against the published algorithm in PyTorch, SmolLM2's shapes; 2 min.

Needs PyTorch (`pip install 'hpcjax[oracles]'`) and a quiet machine.
Expect: about half of PyTorch's time for a block, at the same loss to 1 %
(`hpcjax table gptq/solver-time`).
"""

from experiments.gptq.solver_time import Config

needs = ("torch",)

base = Config()
