"""Reading files from a storage of 40 MB/s for four processes; minutes.

Expect: what is kept and shared loses less than a third of the seconds that reading
ahead loses; with links of 6 MB/s who keeps what counts (`hpcjax table nopfs/loading`).
"""

from dataclasses import replace

from experiments.nopfs.loading import Config

base = Config()
naive = replace(base, reading="naive")
read_ahead = replace(base, reading="read_ahead")
own_memory = replace(base, reading="own_memory")
planned = replace(base, placement="auto")
slow_planned = replace(planned, link=6e6)
slow_first_touch = replace(base, link=6e6, placement="first_touch")
