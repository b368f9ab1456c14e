"""Sums over the edges of 60 000 vertices, by segments and by a sparse matrix; 20 s.

Expect: sorted segments take as long as `jax.experimental.sparse`, shuffled edges longer
(`hpcjax table graphs/spread`).
"""

from experiments.graphs.spread import Config

base = Config()
