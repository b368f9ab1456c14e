"""FLOPs, memory and bytes of each role, from compiled programs; seconds on a CPU.

Expect: backward FLOPs within 2 % of (2iq - 1) / (2kq - 1), memory that grows with the
role, and 3/4 of the bytes of an all-reduce with zeros (`hpcjax table spb/resources`).
"""

from experiments.spb.resources import Config

base = Config(network="chain", k=4, layers=4, width=128, rows=1024)
cnn = Config(network="cnn", k=8, layers=1, width=8, size=16, rows=64)
