"""Cora's papers without a network; 2 s.

Expect: 80 % by regression of S²X, 72 % by label propagation (`hpcjax table
graphs/cora`).
"""

from experiments.graphs.peers import Config

base = Config()
propagation = Config(method="propagation")
