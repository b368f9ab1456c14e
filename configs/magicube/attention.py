"""Digits read as 64 tokens by a Transformer with 90 % sparse attention; a minute.

Expect: 94 % in floats, and with 8 and 4 bits; 11 % with the published scales; 97 % of a
logistic regression of the pixels (`hpcjax table magicube/attention`).
"""

from experiments.magicube.attention import Config

base = Config()
