"""Boards of a HammingMesh that jobs use, with and without failed ones; seconds.

Expect: more than 99 % when the largest jobs are placed first, and three quarters if
they need neighbouring boards and 40 of 256 have failed
(`hpcjax table hammingmesh/allocation`).
"""

from experiments.hammingmesh.allocation import Config

base = Config()
