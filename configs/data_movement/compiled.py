"""What the plain encoder layer moves as JAX writes it and as XLA compiles it; seconds.

Expect: fewer words fused than as primitives (`hpcjax table data_movement/compiled
--tier model`).
"""

from experiments.data_movement.compiled import Config

base = Config()
