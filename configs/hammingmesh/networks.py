"""What nine kinds of networks cost, and their bandwidth for training; a minute.

Expect: a HammingMesh of 2x2 boards costs a fifth of a fat tree, with all of its
bandwidth around rings (`hpcjax table hammingmesh/networks`).
"""

from experiments.hammingmesh.networks import Config

base = Config()
