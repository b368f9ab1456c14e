"""Most memory of a compiled step of Adam, dense and compressed; seconds a run.

Expect: 6.7 bytes a weight with nine tenths pruned, of 16.5 dense
(`hpcjax table samo/peak`).
"""

from experiments.samo.peak import Config

base = Config()
