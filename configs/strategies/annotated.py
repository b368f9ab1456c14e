"""The peer of ZeRO, a program of `jit` with annotations; half a minute a run.

Expect: about the state of stage 3, and the numbers of one device (`hpcjax table
strategies/zero`).
"""

from configs.strategies import zero
from experiments.strategies.annotated import Config
from hpcjax.core.config import fields_of

base = Config(**fields_of(zero.base))
sgd = Config(**fields_of(zero.sgd))
smoke = zero.smoke
