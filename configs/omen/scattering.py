"""Times of the electrons' self-energy in four orders of its sums; two minutes.

Expect: tiles take less than a sixth of the time of a batched loop, and less than a
hundredth of eight loops (`hpcjax table omen/scattering`).
"""

from experiments.omen.scattering import Config

base = Config()
