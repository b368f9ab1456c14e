"""Scores of a million points near 54 000 m²/s² against float64 and peers; 1 to 60 s.

Peers are in the extra `scores`.
Expect: every score is within 1e-6 of its definition, and no slower than the fastest
peer (`hpcjax table forecast/scores`).
"""

from experiments.forecast.scores import Config

base = Config()
one_pass = Config(score="spread", one_pass=True)
