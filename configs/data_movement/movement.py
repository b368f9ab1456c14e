"""Words that an encoder layer of BERT-large moves; seconds.

Expect: 1160 Mi words, 996 fused, 884 with masks drawn again (`hpcjax table
data_movement/movement --tier model`).
"""

from experiments.data_movement.movement import Config

base = Config()
