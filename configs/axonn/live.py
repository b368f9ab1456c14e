"""Four processes whose pipeline follows its messages, beside 1F1B and GPipe; 1 min.

Expect: with as many micro-batches in flight as stages no faster than 1F1B, with twice
as many faster by a tenth (`hpcjax table axonn/live`).
"""

from experiments.axonn.live import Config

base = Config()
