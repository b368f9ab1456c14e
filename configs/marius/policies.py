"""Orders of partitions of WN18RR without training: BETA's and COMET's; seconds.

86,835 links of 40,943 synsets, whose files you have to put into the data root.
Expect: COMET's states are more alike in what they train than BETA's, for a quarter more
reads (`hpcjax table marius/policies`).
"""

from experiments.marius.policies import Config

base = Config()
