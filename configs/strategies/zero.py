"""A language model spread over eight devices by ZeRO; half a minute a run of 2 cores.

Expect: at stage 3 a device holds an eighth of the state, 0.375 times the parameters'
bytes with AdamW, and sends three times these (`hpcjax table strategies/zero`).
"""

from experiments.strategies.zero import Config

base = Config()
