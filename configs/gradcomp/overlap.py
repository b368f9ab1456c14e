"""Gradients of two processes averaged while the rest is computed; 1 min on 2 cores.

Expect: at most 60 % of the communication is seen, where it takes as long as the
backward pass; a quarter, the last of four buckets, always is (`hpcjax table
gradcomp/overlap`).
"""

from experiments.gradcomp.overlap import Config

base = Config()
