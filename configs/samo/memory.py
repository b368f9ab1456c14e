"""Bytes of a language model's training state with SAMO; seconds a run on 8 devices.

Expect: within 1 % of 2 n + 16 k bytes between steps for n parameters of which k are
kept, and all-reduces of k values (`hpcjax table samo/memory`).
"""

from experiments.samo.memory import Config

base = Config()
