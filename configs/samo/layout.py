"""Stages and seconds of GPT-3's sizes on V100s, dense and with SAMO; formulas only.

Expect: fewer stages, and more to gain the more devices there are (`hpcjax table
samo/layouts --tier model`).
"""

import dataclasses

from experiments.samo.layout import Config

samo = Config()
dense_sums = dataclasses.replace(samo, compressed_sums=False)
base = samo
