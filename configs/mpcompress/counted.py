"""Tables of characters, and of pairs, of the text of `mpcompress/layers`; a second.

Needs `hpcjax data fetch kjv`.
Expect: 65 % of characters told wrongly by pairs, 81 % without
(`hpcjax table mpcompress/layers`).
"""

import dataclasses

from configs.mpcompress import layers
from experiments.mpcompress.floors import Config

needs = ("kjv",)
base = Config(dataset=layers.base.dataset)
unigram = dataclasses.replace(base, known=0)
smoke = {"dataset.context": "8"}
