"""What a 6.7 B base with 16 experts takes on each of 128 devices; seconds.

Expect: 28.2, 15.8, 9.6 and 6.5 GiB for 1, 2, 4 and 8 devices to a matrix
(`hpcjax table ted/plan --tier model`).
"""

from experiments.ted.plan import Config

base = Config()
