"""Digits read as 64 tokens by a Transformer with 90 % sparse attention; a minute.

Expect: 92 % in floats, and with 8 and 4 bits; 16 % with the published scales
(`hpcjax table magicube/attention`).
"""

from experiments.magicube.attention import Config

base = Config()
