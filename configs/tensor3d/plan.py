"""The planner's grids for language models of 5 to 40 billion parameters; seconds.

Expect: two thirds of Megatron's words for 40 billion on 256 devices (`hpcjax table
tensor3d/weak-scaling --tier model`).
"""

from experiments.tensor3d.plan import Config

base = Config()
