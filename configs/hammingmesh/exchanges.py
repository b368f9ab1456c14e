"""What exchanges of gradients take on three networks, and what these cost; seconds.

Expect: a dense all-reduce takes as long on a HammingMesh as on a fat tree; messages to
all take four times as long on a torus (`hpcjax table hammingmesh/exchanges`).
"""

from experiments.hammingmesh.exchanges import Config

base = Config()
