"""ResNet-8 on small Fashion-MNIST, of one size and of several; half a minute a run.

`hpcjax data fetch fashion-mnist` gets the images.
Expect: with batch norms calibrated at 8 px, trained on several sizes it is right 25
points more often than trained on 16 px (`hpcjax table mixsize/fashion`).
"""

import dataclasses

from experiments.mixsize.sizes import Config
from hpcjax.data import CropFlipConfig, FashionMnistConfig, MixedSizesConfig
from hpcjax.models import ResNetConfig
from hpcjax.optim import SgdConfig, StepDecayConfig
from hpcjax.train.config import TrainConfig

IMAGES = FashionMnistConfig(
    limit=4000, validation_limit=2000, pad=2, augment=CropFlipConfig()
)
EPOCHS = 20


def _on(sizes, probs, slots, **more):
    steps = EPOCHS * slots
    return Config(
        dataset=MixedSizesConfig(
            of=IMAGES, sizes=sizes, probs=probs, base_size=16, **more
        ),
        model=ResNetConfig(depth=8, width=8),
        optimizer=SgdConfig(lr=0.1, schedule=StepDecayConfig(at=(0.6, 0.8))),
        train=TrainConfig(
            steps=steps, batch_size=64, eval_every=steps, checkpoint_every=0
        ),
    )


_SIZES, _PROBS = (8, 12, 16, 24), (0.2, 0.3, 0.3, 0.2)
fixed = _on((16,), (1.0,), 62)
bplus = _on(_SIZES, _PROBS, 59)
dplus = _on(_SIZES, _PROBS, 76, mode="D+")
half = _on((16, 12, 8), (0.2, 0.5, 0.3), 33)
smoothed = dataclasses.replace(
    bplus, optimizer=dataclasses.replace(bplus.optimizer, smooth_norm=0.9)
)
base = bplus
