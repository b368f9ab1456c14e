"""What the training config is not: typos and impossible runs are told before JAX."""

import random
import subprocess
import sys

import pytest

from hpcjax.core import ConfigError
from hpcjax.runs import discover, overrides
from tests.runs.test_overrides import typo
from tests.system.test_configs import REPOSITORY

MEMBERS = [
    {},
    {"optimizer": "jorge", "exchange": "ok_topk", "model": "resnet"},
    {"optimizer": "kfac", "dataset": "char_text", "model": "causal_lm"},
    {"optimizer": "shampoo", "averaging": "wagma"},
    {"optimizer": "lamb", "exchange": "power_sgd"},
]


def hint(config, key):
    with pytest.raises(ConfigError) as caught:
        overrides.parse(config, {key: "1"})
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.faults(19)
def test_the_key_that_was_meant_is_suggested_for_most_of_two_hundred_typos():
    rng, missed = random.Random(0), []
    for given in MEMBERS:
        config = discover.load("train/digits", given, REPOSITORY).config
        known = overrides.keys(config)
        allowed = [path for path, key in known.items() if key.settable]
        for _ in range(200 // len(MEMBERS)):
            key = rng.choice(allowed)
            while (bad := typo(key, rng)) in known:
                pass
            if f"did you mean {key!r}" not in hint(config, bad):
                missed.append((key, bad))
    assert len(missed) <= 0.05 * 200, missed


@pytest.mark.faults(19)
def test_a_typo_in_a_whole_key_is_not_taken_for_the_end_of_another():
    config = discover.load("train/digits", {"averaging": "eager"}, REPOSITORY).config
    assert "did you mean 'model'" in hint(config, "modle")
    assert "did you mean 'averaging.mode'" in hint(config, "averaging.mod")
    assert "did you mean 'optimizer.momentum'" in hint(config, "momentun")


REFUSED = {
    "train.batchsize=4": "did you mean 'train.batch_size'",
    "optimizer=jorg": "did you mean 'jorge'",
    "train.steps=many": "train.steps must be int",
    "exchange=ok_topk exchange.density=0": "density must be in (0, 1]: got density=0.0",
    "train.batch_size=10 --devices 4": "must divide by the 4 devices: got 10",
    "train.batch_size=3 --processes 2": "must divide by the 2 devices: got 3",
    "train.batch_size=4 train.accumulate=3 --devices 2": "the 2 examples of a device",
    "model=unet": "which model=unet does not learn",
    "optimizer=kfac backward=partial": "both have a backward pass of their own",
}
CALLS = """
import sys
from hpcjax.runs import cli
for words in {calls}:
    code = cli.main(["run", "train/digits", *words.split()])
    loaded = {{"jax", "jaxlib", "flax", "optax"}} & set(sys.modules)
    print("|", code, *loaded, file=sys.stderr, flush=True)
"""


@pytest.mark.faults(19)
def test_a_run_that_cannot_be_is_refused_without_jax(tmp_path):
    """And so before anything is compiled; no folder is made for it either."""
    done = subprocess.run(
        [sys.executable, "-c", CALLS.format(calls=list(REFUSED))],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=True,
    )
    *told, rest = done.stderr.split("| 2\n")
    assert rest == ""
    for (words, message), error in zip(REFUSED.items(), told, strict=True):
        assert message in error, words
    assert not list(tmp_path.iterdir())
