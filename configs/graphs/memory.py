"""Memory of a compiled step on sampled neighbourhoods, and on the whole graph; 20 s.

Expect: a step of blocks needs less than half of that of the graph (`hpcjax table
graphs/minibatches`).
"""

from configs.graphs import minibatches
from hpcjax.core.config import fields_of
from hpcjax.runs import ProgramConfig

base = ProgramConfig(**fields_of(minibatches.dense))
whole = ProgramConfig(**fields_of(minibatches.whole))
