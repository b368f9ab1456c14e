"""VGG-16 of an eighth of the width on Fashion-MNIST, 8 devices; 2 min a run, 2 cores.

Needs `hpcjax data fetch fashion-mnist`. The exchanges of `oktopk/digits`, on 60 000
pictures padded to 32×32, of which 2 000 others are held out.
Expect: the accuracy of Ok-Topk is within one point of the dense exchange's
(`oktopk/fashion`), which one epoch does not reach: 2.3 points below.
"""

import dataclasses

from configs.oktopk import digits
from hpcjax.data import FashionMnistConfig
from hpcjax.train.config import TrainConfig

needs = ("fashion-mnist",)

dense = dataclasses.replace(
    digits.dense,
    dataset=FashionMnistConfig(pad=2, validation_limit=2000),
    train=TrainConfig(steps=480, batch_size=128, eval_every=120),
)
top_k = dataclasses.replace(dense, exchange=digits.top_k.exchange)
gtopk = dataclasses.replace(dense, exchange=digits.gtopk.exchange)
gaussian_k = dataclasses.replace(dense, exchange=digits.gaussian_k.exchange)
ok_topk = dataclasses.replace(dense, exchange=digits.ok_topk.exchange)
base = ok_topk
smoke = digits.smoke
