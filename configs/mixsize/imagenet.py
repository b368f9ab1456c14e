"""ResNet-50 on pictures of your own, such as ImageNet's, of sizes around 224; days.

The paper's regime: 90 epochs of 1,281,167 pictures, batches of 256 at 224 px.
Expect: the paper has 76.4 % at 160 px and 79.3 % at 288 px; not run here.
"""

from experiments.mixsize.sizes import Config
from hpcjax.data import CropFlipConfig, ImageFolderConfig, MixedSizesConfig
from hpcjax.models import ResNetConfig
from hpcjax.optim import SgdConfig, StepDecayConfig
from hpcjax.train.config import TrainConfig

_SLOTS, _EPOCHS = 5_386, 90
base = Config(
    dataset=MixedSizesConfig(
        of=ImageFolderConfig(size=320, resize=366, augment=CropFlipConfig(pad=32)),
        sizes=(128, 160, 192, 256, 288, 320, 224),
        probs=(*[0.8 / 6] * 6, 0.2),
        base_size=224,
        filter="bicubic",
    ),
    model=ResNetConfig(depth=50, zero_init_residual=True),
    optimizer=SgdConfig(
        lr=0.1,
        weight_decay=1e-4,
        decay_rules=(("kernel$", True), (".*", False)),
        schedule=StepDecayConfig(at=(1 / 3, 2 / 3, 8 / 9)),
    ),
    train=TrainConfig(
        steps=_SLOTS * _EPOCHS,
        batch_size=256,
        eval_every=_SLOTS,
        checkpoint_every=_SLOTS,
    ),
    test_sizes=(128, 160, 192, 224, 256, 288, 320),
    calibration=200,
)
