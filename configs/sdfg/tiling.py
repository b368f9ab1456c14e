"""A matrix product in tiles, by rules; half a minute.

Expect: tiles load 2N³/T + 2N² elements (`hpcjax table sdfg/tiling`).
"""

from experiments.sdfg.tiling import Config

base = Config()
