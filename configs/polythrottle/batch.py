"""Energy a query against the batch, measured on a GPU with its clocks as they are.

Expect: a large batch takes less than half of one query's energy
(`hpcjax table polythrottle/batch --tier gpu`).
"""

from experiments.polythrottle.batch import Config

base = Config()
needs = ("gpu",)
