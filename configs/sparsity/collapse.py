"""A bias-free 64-100-100-10 perceptron of which 0.5 % is left; seconds a run.

A variant for each score: `:snip`, `:iterative_snip`, `:synflow`, ...
Expect: SynFlow in 100 rounds leaves every layer 15 weights or more, SNIP in one at most
two thirds of that in the thinnest (`hpcjax table sparsity/collapse --tier model`).
"""

import dataclasses

from experiments.sparsity.collapse import Config

synflow = Config(score="synflow", rounds=100)
one_round = dataclasses.replace(synflow, rounds=1)
snip = Config(score="snip")
iterative_snip = dataclasses.replace(snip, rounds=100)
grasp = Config(score="grasp")
magnitude = Config(score="magnitude")
random = Config(score="random")
base = synflow
