"""Bytes of K-FAC on 8 simulated devices, ResNet-50's shapes; 1 min a run, 11 GB.

Expect: memory linear in the fraction of gradient workers, and collectives as the
formulas say (`hpcjax table kaisa/memory`, `hpcjax table kaisa/bytes`).
"""

from experiments.kaisa.sharing import Config

base = Config()
