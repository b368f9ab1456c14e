"""Two processes that send each other codes on a slow and a fast link; 2 min.

Expect: on 100 Mbit/s the autoencoder takes a third of the time without a codec, on 10
Gbit/s nothing helps (`hpcjax table mpcompress/time`).
"""

from experiments.mpcompress.between import Config

base = Config()
