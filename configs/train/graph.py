"""Any parts together, on a graph: papers of Cora with a small graph network; 10 s.

`hpcjax run train/graph model.layer=gat optimizer=jorge exchange=ok_topk --devices 4`.
Expect: 79 % of the validation part (`hpcjax table graphs/cora` has the test part).
"""

from configs.graphs import cora

base = cora.gcn
