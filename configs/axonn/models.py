"""The paper's models of 12, 24, 50 and 100 billion parameters; seconds.

Expect: 12.0, 23.5, 49.4 and 101.4 billion parameters, the table's counted once, for the
head is tied to it.
"""

from experiments.axonn.plan import Config
from hpcjax.models import CausalLmConfig

base = Config(model=CausalLmConfig(depth=48, width=4512, heads=24))
b24 = Config(model=CausalLmConfig(depth=48, width=6336, heads=36))
b50 = Config(model=CausalLmConfig(depth=96, width=6528, heads=48))
b100 = Config(model=CausalLmConfig(depth=96, width=9360, heads=60))
