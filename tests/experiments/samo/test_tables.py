"""SAMO's tables: their claims in small live runs, and with the mechanism broken."""

import dataclasses
import types

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.samo import layout, memory, peak, tables, training
from hpcjax import sharding
from hpcjax.data import CharTextConfig
from hpcjax.models import CausalLmConfig
from hpcjax.optim import AdamWConfig, sparse_state
from hpcjax.runs.tables import judge

SMALL = CausalLmConfig(depth=2, width=32, heads=2, remat="full")


def one_seed(dataset):
    return dataset.expand_dims(seed=[0])


@pytest.mark.slow
@pytest.mark.acceptance("samo", 2)
def test_live_bytes_and_sums_are_those_of_the_formula():
    context = types.SimpleNamespace(mesh=sharding.data_mesh(8))
    rows = {
        row: one_seed(
            memory.run(
                memory.Config(
                    form=form, sparsity=sparsity, model=SMALL, characters=16, context=8
                ),
                context,
            )
        )
        for row, form, sparsity in (
            ("dense", "dense", 0.5),
            ("int32, p = 0.9", "int32", 0.9),
        )
    }
    table = tables.MEMORY.reduce(rows)
    assert abs(table["held"] / table["formula"] - 1).max() < 0.01
    pruned = table.sel(row="int32, p = 0.9")
    assert float(pruned["sent_share"]) == pytest.approx(
        float(pruned["gradients_share"]), rel=1e-3
    )
    assert 0.1 < float(pruned["sent_share"]) < 0.15
    assert float(pruned["held_share"]) < 0.4


@pytest.mark.slow
def test_losses_are_those_of_masked_training_and_learn(tmp_path):
    cfg = training.Config(
        dataset=CharTextConfig(context=8),
        model=CausalLmConfig(depth=1, width=16, heads=2),
        optimizer=AdamWConfig(lr=5e-3),
        steps=20,
        every=5,
        most=3,
        sparsity=0.5,
    )
    made = training.run(cfg, types.SimpleNamespace(data_root=tmp_path))
    table = tables.QUALITY.reduce(
        {p: one_seed(made) for p in ("p = 0.5", "p = 0.8", "p = 0.9")}
    )
    claims = tables.QUALITY.tier("cpu").claims
    identical = claims["identical"]
    assert identical.holds(identical.ours(table))
    assert not identical.holds(identical.ours(identical.controls[0].apply(table)))
    loss = {form: made["val_loss"].sel(form=form).item() for form in training.FORMS}
    assert loss["samo"] == pytest.approx(loss["masked"], abs=1e-5)
    assert loss["samo"] < loss["unwritten"] - 0.05
    assert loss["random"] != loss["samo"]
    assert made["kept"].item() == pytest.approx(0.5, abs=1e-3)


@pytest.mark.acceptance("samo", 5)
def test_a_step_holds_one_dense_gradient_and_writes_weights_in_place():
    sizes = {"depth": 24, "width": 128, "rows": 8}
    found = {
        form: peak.run(peak.Config(form=form, **sizes), None)["peak"].item()
        for form in ("dense", "int32", "bitmap", "after")
    }
    # Weights, Adam's moments and gradients: 4 + 8 + 4 bytes each.
    assert found["dense"] == pytest.approx(16.5, abs=0.5)
    # 4 of weights, and a tenth of 16, 4 of positions, 4 while they are updated.
    assert found["int32"] < 7.2
    assert found["bitmap"] < 7.4
    assert found["after"] > 10


@pytest.mark.slow
def test_a_ticket_is_drawn_when_masks_settle():
    cfg = training.Config(every=1, most=6, pruned=(".*",))
    settled = dataclasses.replace(cfg, tolerance=0.5)
    for given, drawn in ((cfg, 6), (settled, 5)):
        loop = Masks()
        assert training.find_ticket(given, loop, {"w": loop.weights})[2] == drawn


class Masks:
    """A loop whose weights change their order at random in every step."""

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.weights = jnp.asarray(self.rng.normal(size=(8, 8)), jnp.float32)

    def batch(self):
        return self.rng

    def start(self, params, chosen):
        return sparse_state.compress(params, {"w": None}, dtype="float32")

    def step(self, state, rng):
        moved = {"w": rng.permuted(state.params["w"])}
        return sparse_state.compress(moved, {"w": None}, dtype="float32"), 0.0


@pytest.mark.slow
def test_layouts_hold_their_claims_and_fail_with_their_controls():
    tier = tables.LAYOUTS.tier("model")
    rows = {
        name: one_seed(
            layout.run(
                layout.Config(
                    model=runs.overrides["model"],
                    devices=int(runs.overrides["devices"]),
                    compressed_sums=not runs.config.endswith("dense_sums"),
                ),
                None,
            )
        )
        for name, runs in tier.runs.items()
    }
    table = tables.LAYOUTS.reduce(rows)
    assert all(verdict.holds for verdict in judge(tier, table))
    stages = table.sel(row="2.7B, G = 128")
    assert (stages["dense_stages"], stages["samo_stages"]) == (8, 2)
