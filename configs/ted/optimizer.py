"""What an update of 10^7 parameters needs besides its state, in tiles of 10^6; 5 s.

Expect: 4 bytes an entry of a tile, and 4 of each parameter where gradients are cast,
clipped and used by programs of their own (`hpcjax table ted/optimizer`).
"""

from experiments.ted.optimizer import Config

base = Config()
