"""Reading files from a storage of 40 MB/s for four processes; minutes.

Expect: clairvoyant reading loses less than a third of the seconds that reading ahead
loses, and reads the storage less than half as often (`hpcjax table nopfs/loading`).
"""

from dataclasses import replace

from experiments.nopfs.loading import Config

base = Config()
naive = replace(base, reading="naive")
read_ahead = replace(base, reading="read_ahead")
own_memory = replace(base, reading="own_memory")
