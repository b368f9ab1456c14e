"""Edges that DENSE and layer-wise sampling list for batches of WordNet; 1 min.

117,659 sets of synonyms with their pointers in both directions, for which `hpcjax data
fetch wordnet`.
Expect: DENSE lists a quarter fewer edges for 1,000 targets and three layers, a third
fewer for 5,000 (`hpcjax table graphs/sampled`).
"""

from experiments.graphs.sampled import Config

base = Config()
