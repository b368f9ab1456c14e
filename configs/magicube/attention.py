"""Digits read as 64 tokens by a Transformer with 90 % sparse attention; a minute.

Expect: 95 % in floats, and with 8 bits; 4 points less at the most with 4
(`hpcjax table magicube/attention`).
"""

from experiments.magicube.attention import Config

base = Config()
