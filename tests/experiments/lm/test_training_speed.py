"""The table of a language model's training step, against figures by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lm.tables import TRAINING
from hpcjax import perf
from tests.experiments import rows


def test_a_step_that_takes_as_long_as_four_products_of_its_operations():
    run = rows.run(
        {
            "candidate": [
                *("step", "short step", "product"),
                *("attention, xla", "attention, cudnn"),
            ],
            "operation": ["gemm", "fusion"],
        },
        seconds=(
            "candidate repetition",
            [[0.4, 0.4, 9.0], *([each] * 3 for each in (0.2, 0.1, 0.3, 0.2))],
        ),
        share=("operation", [0.8, 0.15]),
        tokens=1000,
        flops=1e12,
        short_flops=1e11,
        peak=1e12,
    )
    table = TRAINING.reduce({"all": run})
    found = rows.verdicts(TRAINING, table)
    assert found["step"].ours == pytest.approx(0.25)
    assert found["attention"].ours == pytest.approx(1.5)
    row = table.sel(row="GPT-2 medium")
    assert row["rate"] == pytest.approx(2500)
    assert table["share"].sel(row="128 tokens") == pytest.approx(0.05)
    assert row["sheet"] == pytest.approx(2.5e12 / 989e12)
    gemm = table.sel(row="step: gemm")
    assert (gemm["milliseconds"], gemm["time"]) == (pytest.approx(320), 0.8)
    assert np.isnan(gemm["share"])


def test_a_profile_tells_operations_apart():
    """A product of many numbers takes longer than a sum of few, by far."""
    wide, narrow = jnp.ones((512, 512)), jnp.ones(8)
    both = jax.jit(lambda x, y: (x @ x, jnp.cumsum(y)))
    found = perf.seconds_by_operation(lambda: both(wide, narrow))
    assert len(found) >= 2
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert not [name for name in found if name[-1].isdigit()]
