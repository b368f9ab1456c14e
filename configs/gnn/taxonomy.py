"""Layers of a graph network by four kinds of parallelism, traced; a minute.

Expect: a step of each combination that is not refused (`hpcjax table gnn/taxonomy`).
"""

import dataclasses

from experiments.gnn.taxonomy import Config

base = Config()
other = dataclasses.replace(base, layers=("gcn",), composed_for=2)
