"""Simulated pipelines whose order follows the messages, beside 1F1B; seconds.

`hpcjax run axonn/order jitter=0.3 in_flight=8`.
Expect: with as many micro-batches in flight as stages slower than 1F1B, with twice as
many faster by a tenth and more (`hpcjax table axonn/order`).
"""

from experiments.axonn.order import Config

base = Config()
