"""Which operations of any model, or of its training step, move the words; seconds.

`hpcjax run sdfg/model model=causal_lm dataset=char_text what=step`; leaves
`history.json` and `words.png`.
Expect: of most models nothing but gathers is opaque (`hpcjax table sdfg/models`).
"""

import dataclasses

from experiments.sdfg.model import Config
from hpcjax.data import (
    CharTextConfig,
    ClicksConfig,
    HeatConfig,
    KarateConfig,
    MaskedTextConfig,
    PhantomsConfig,
)
from hpcjax.models import (
    BertConfig,
    CausalLmConfig,
    CnnConfig,
    DlrmConfig,
    GnnConfig,
    ResNetConfig,
    UNetConfig,
)

base = Config()
resnet = dataclasses.replace(base, model=ResNetConfig())
unet = dataclasses.replace(base, model=UNetConfig(), dataset=PhantomsConfig())
causal_lm = dataclasses.replace(base, model=CausalLmConfig(), dataset=CharTextConfig())
cnn = dataclasses.replace(base, model=CnnConfig(), dataset=HeatConfig())
bert = dataclasses.replace(base, model=BertConfig(), dataset=MaskedTextConfig())
dlrm = dataclasses.replace(base, model=DlrmConfig(), dataset=ClicksConfig())
gnn = dataclasses.replace(base, model=GnnConfig(), dataset=KarateConfig())
