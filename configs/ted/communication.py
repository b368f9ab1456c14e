"""What a block with experts sends, and a hundred steps on characters; 20 s a run.

Eight devices are simulated.
Expect: two devices with equal tokens halve the bytes of all-to-alls, eight collectives
in place of twelve, the losses of one device (`hpcjax table ted/communication`).
"""

import dataclasses

from experiments.ted.communication import Config

base = Config()
full = Config(model=dataclasses.replace(base.model, remat="full"))
duplicates = Config(drop_duplicates=False)
plain = dataclasses.replace(full, drop_duplicates=False)
scattered = Config(broken="scattered")
