"""Work and depth of graph layers, read from their programs at 30 shapes; a minute.

Expect: O(mk + nk²) operations of all but edge_conv, which has O(mk²)
(`hpcjax table gnn/work-depth`).
"""

from experiments.gnn.work_depth import Config

base = Config()
