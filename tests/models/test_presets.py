"""Published sizes: parameters by shapes alone, and operations of a step."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import core, models
from tests.models import helpers
from tests.models.registry import REGISTRY

COUNTS = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "opt-66b": 65_719_701_504,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama2-70b": 68_976_648_192,
    "smollm2-135m": 134_515_008,
}


def sized(name, **changes):
    config, context, vocabulary = models.preset(name)
    return dataclasses.replace(config, **changes).make((context,), vocabulary)


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_of_published_sizes(name):
    assert models.num_params(sized(name)) == COUNTS[name]


@pytest.mark.parametrize(
    ("name", "head", "count"),
    [
        ("bert-base", "pooler", 109_482_240),
        ("bert-base", "none", 108_891_648),
        ("bert-base", "masked_lm", 109_514_298),
        ("bert-large", "pooler", 335_141_888),
    ],
)
def test_parameters_of_bert(name, head, count):
    assert models.num_params(sized(name, head=head)) == count


def test_every_preset_is_counted():
    assert set(COUNTS) | {"bert-base", "bert-large"} == set(models.PRESETS)
    with pytest.raises(core.ConfigError, match="did you mean 'gpt2-medium'"):
        models.preset("gpt2-medum")


@pytest.mark.parametrize(
    ("name", "time", "expected"),
    [
        # 12 d² a block, the head V d, and attention 12 L d T.
        (
            "gpt2-medium",
            1024,
            6 * (24 * 12 * 1024**2 + 50257 * 1024) + 12 * 24 * 1024 * 1024,
        ),
        # 4 d² + 3 d ff a block; the untied table is no product.
        (
            "llama-7b",
            2048,
            6 * (32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096)
            + 12 * 32 * 4096 * 2048,
        ),
        # Grouped keys and values; a tied head counts once.
        (
            "smollm2-135m",
            512,
            6 * (30 * (2 * 576**2 + 2 * 576 * 192 + 3 * 576 * 1536) + 49152 * 576)
            + 12 * 30 * 576 * 512,
        ),
        # The head sees each place, pooler and order of sentences only the first.
        (
            "bert-base",
            128,
            6 * (12 * 12 * 768**2 + 768**2 + 30522 * 768) + 12 * 12 * 768 * 128,
        ),
    ],
)
def test_operations_of_a_training_step(name, time, expected):
    config, _, vocabulary = models.preset(name)
    assert models.flops_per_token(config, time, vocabulary) == expected


def test_operations_of_an_encoder_without_head():
    config = models.BertConfig(depth=1, width=8, heads=2, head="pooler")
    assert models.flops_per_token(config, 4, 11) == 6 * 12 * 64 + 12 * 8 * 4


def test_presets_do_not_import_jax():
    code = "import sys, hpcjax.models._presets; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.quick("none", "pooler")
@pytest.mark.parametrize("head", ["masked_lm", "pooler", "none"])
def test_parts_of_bert_are_those_of_the_whole(head):
    whole, params, state, x, _ = helpers.instance("bert")
    entry = REGISTRY["bert"]
    part = helpers.make(
        entry._replace(config=dataclasses.replace(entry.config, head=head))
    )
    like, _ = jax.eval_shape(part.init, jax.random.key(0))
    kept = {name: params[name] for name in like}
    found, _ = part.apply(kept, state, x, train=False)
    if head == "masked_lm":
        wanted, _ = whole.apply(params, state, x, train=False)
        np.testing.assert_allclose(found, wanted.tokens, rtol=0, atol=1e-5)
        return
    taps = {"transform": core.Tap(forward=lambda x, y: x)}
    _, after = whole.apply(params, state, x, train=False, taps=taps)
    hidden = after[core.SEEN]["transform"]
    np.testing.assert_allclose(found.hidden, hidden, rtol=0, atol=1e-5)
    if head == "none":
        assert found.pooled is None
        return
    pooler = params["pooler"]
    wanted = jnp.tanh(hidden[:, 0] @ pooler["kernel"] + pooler["bias"])
    np.testing.assert_allclose(found.pooled, wanted, rtol=0, atol=1e-5)
