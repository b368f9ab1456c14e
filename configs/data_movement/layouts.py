"""The best layouts of a fused encoder layer, by a roofline's times; ten seconds.

Expect: a gap of zero, 2 % above each kernel's fastest layouts (`hpcjax table
data_movement/layouts --tier model`).
"""

from experiments.data_movement.layouts import Config

base = Config()
