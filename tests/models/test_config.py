import copy
import subprocess
import sys

import pytest

from hpcjax import core, models


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.MlpConfig(widths=(0,)), r"widths\[0\] must be an integer >="),
        (lambda: models.ResNetConfig(depth=9), r"depth must be 8 \| 18"),
        (lambda: models.ResNetConfig(width=0), "width=0"),
        (lambda: models.CausalLmConfig(width=10, heads=4), "heads must divide width"),
        (lambda: models.CausalLmConfig(heads=4, kv_heads=3), "kv_heads must divide"),
        (lambda: models.CausalLmConfig(depth=0), "depth=0"),
        (lambda: models.TransformerOptions(norm_eps=0.0), "norm_eps must be .* > 0"),
        (lambda: models.CausalLmConfig(head_dim=0), "head_dim=0"),
        (
            lambda: models.CausalLmConfig(width=6, heads=2, options=models.LLAMA),
            "even number",
        ),
        (
            lambda: models.CausalLmConfig(head_dim=5, options=models.LLAMA),
            "even number.*head_dim=5",
        ),
        (lambda: models.TransformerOptions(embed_width=0), "embed_width=0"),
        (lambda: models.RopeScaling(low=4.0), "high > low: got low=4.0"),
        (lambda: models.RopeScaling(context=0), "context=0"),
        (lambda: models.mlp((3,), 0), "outputs=0"),
        (lambda: models.mlp((3,), 2, widths=(0,)), "widths.*=0"),
        (lambda: models.resnet((8, 8), 2), r"inputs=\(8, 8\)"),
        (lambda: models.resnet((8, 8, 1), 2, depth=21), "depth=21"),
        (lambda: models.causal_lm((4, 4), 2), r"inputs=\(4, 4\)"),
        (lambda: models.BertConfig(width=10, heads=4), "heads must divide width"),
        (lambda: models.BertConfig(mlp_width=0), "mlp_width=0"),
        (lambda: models.bert((4, 2), 2), r"inputs=\(4, 2\)"),
        (lambda: models.bert((4, 3), 0), "outputs=0"),
        (lambda: models.UNetConfig(depth=0), "depth must be .* >= 1 .*: got depth=0"),
        (lambda: models.unet((8, 8, 1), 2, width=0), "width=0"),
        (lambda: models.unet((8, 8), 2), r"inputs=\(8, 8\)"),
        (lambda: models.unet((8, 12, 1), 2, depth=3), r"2\*\*depth must divide"),
    ],
)
def test_what_cannot_be_built_is_refused(make, message):
    with pytest.raises(core.ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("config", "field", "value", "message"),
    [
        (models.MlpConfig(), "activation", "rleu", "did you mean 'relu'"),
        (models.ResNetConfig(), "norm", "bach", "did you mean 'batch'"),
        (models.ResNetConfig(), "shortcut", "C", "shortcut='C'"),
        (models.CausalLmConfig(), "remat", "ful", "did you mean 'full'"),
        (models.BertConfig(), "head", "poler", "did you mean 'pooler'"),
        (models.TransformerOptions(), "position", "rotary", "position='rotary'"),
    ],
)
def test_names_are_checked(config, field, value, message):
    # Set behind the constructor, which the tests' type checker guards as well.
    wrong = copy.copy(config)
    object.__setattr__(wrong, field, value)
    with pytest.raises(core.ConfigError, match=message):
        wrong.__post_init__()


def test_configs_do_not_import_jax():
    code = "import sys, hpcjax; hpcjax.models.LLAMA; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
