"""WordNet in an embedded database and in a file, and predictions back; 90 s.

117,659 sets of synonyms and 285,348 pointers, for which `hpcjax data fetch wordnet`.
Expect: what is read is what was saved, and features have 4 % of their dense matrix's
bytes (`hpcjax table lpg2vec/store`).
"""

from experiments.lpg2vec.store import Config

base = Config()

wordnet = base
