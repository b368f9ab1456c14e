"""Steps and pixels of an epoch of the paper's regimes; seconds.

Expect: of 781 steps B+ takes 761, with 0.968 of the pixels, and D+ 981, with 1.286
(`hpcjax table mixsize/work`).
"""

from experiments.mixsize.work import Config

cifar = Config()
imagenet = Config(
    examples=1_281_167,
    batch_size=256,
    base_size=224,
    sizes=(128, 160, 192, 256, 288, 320, 224),
    probs=(*[0.8 / 6] * 6, 0.2),
)
small = Config(
    examples=1_281_167,
    batch_size=256,
    base_size=224,
    sizes=(256, 224, 128, 96),
    probs=(0.1, 0.1, 0.6, 0.2),
)
base = cifar
