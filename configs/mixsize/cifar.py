"""ResNet-44 on CIFAR-10, of one size and of several; hours on a GPU.

The paper's regime: 200 epochs, batches of 64 at 32 px. No package carries the images.
Expect: 761 steps and 0.97 of the pixels an epoch for B+, 981 and 1.29 for D+, of 781
(`hpcjax table mixsize/work`).
"""

from experiments.mixsize.sizes import Config
from hpcjax.data import Cifar10Config, CropFlipConfig, MixedSizesConfig
from hpcjax.models import ResNetConfig
from hpcjax.optim import SgdConfig, StepDecayConfig
from hpcjax.train.config import TrainConfig

EPOCHS = 200


def _on(sizes, probs, slots, **more):
    return Config(
        dataset=MixedSizesConfig(
            of=Cifar10Config(augment=CropFlipConfig()),
            sizes=sizes,
            probs=probs,
            base_size=32,
            **more,
        ),
        model=ResNetConfig(depth=44),
        optimizer=SgdConfig(
            lr=0.1,
            weight_decay=1e-4,
            decay_rules=(("kernel$", True), (".*", False)),
            schedule=StepDecayConfig(at=(81 / 200, 122 / 200, 164 / 200)),
        ),
        train=TrainConfig(
            steps=EPOCHS * slots,
            batch_size=64,
            eval_every=10 * slots,
            checkpoint_every=10 * slots,
        ),
        test_sizes=(16, 24, 32, 48),
        calibration=200,
        calibration_rows=64,
    )


_SIZES, _PROBS = (32, 48, 24, 16), (0.3, 0.2, 0.3, 0.2)
fixed = _on((32,), (1.0,), 781)
bplus = _on(_SIZES, _PROBS, 761)
dplus = _on(_SIZES, _PROBS, 981, mode="D+")
base = bplus
