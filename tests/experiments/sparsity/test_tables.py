"""The sparsity toolkit's tables: their claims in small live runs, and broken ones."""

import types

import numpy as np
import pytest

from experiments.sparsity import collapse, one_shot, support, tables
from hpcjax.models import MlpConfig
from hpcjax.optim import SgdConfig
from tests.experiments import rows
from tests.experiments.rows import verdicts


def pruned(**settings):
    settings = {"search": False, **settings}
    return collapse.run(collapse.Config(**settings), None)


@pytest.mark.slow
@pytest.mark.acceptance("sparsity", 13)
def test_synflow_leaves_the_thinnest_layer_more_than_snip():
    found = {
        "synflow": pruned(score="synflow", rounds=100),
        "snip": pruned(score="snip"),
    }
    for run in found.values():
        assert run["kept"].sum() == 87
    made = {
        name: run.assign(empties=0.0).expand_dims(seed=[0])
        for name, run in found.items()
    }
    claims = verdicts(tables.COLLAPSE, tables.collapse(made))
    assert all(claim.holds for claim in claims.values()), claims
    # Neither holds of the other's weights, nor of SynFlow's score in one round.
    swapped = {"synflow": made["snip"], "snip": made["synflow"]}
    once = pruned(score="synflow", rounds=1).assign(empties=0.0).expand_dims(seed=[0])
    for broken in (swapped, {**made, "synflow": once}):
        claims = verdicts(tables.COLLAPSE, tables.collapse(broken))
        assert not any(claim.holds for claim in claims.values()), claims


def test_the_density_at_which_a_layer_empties_is_that_of_masks_layer_by_layer():
    """By brute force: of all counts the largest that leaves a layer none."""
    small = {"widths": (6, 5, 4), "density": 0.5, "examples": 8}
    cfg = collapse.Config(score="magnitude", **small)
    params = collapse._network(cfg)
    sizes = np.concatenate([np.abs(leaf).ravel() for leaf in params.values()])
    layer = np.repeat([0, 1], [30, 20])
    order = layer[np.argsort(-sizes)]
    most = max(k for k in range(1, 50) if len(set(order[:k])) < 2)
    for rounds in (1, 2):  # whose scores are the same
        found = pruned(score="magnitude", rounds=rounds, search=True, **small)
        expected = most if most >= 2 or rounds == 1 else 0
        assert found["empties"] == pytest.approx(100 * expected / 50)


def test_the_teacher_has_as_many_weights_as_it_should_of_either_sign():
    teacher = support.draw_teacher(support.Config(inputs=20, outputs=5))
    weights = teacher[teacher != 0]
    assert weights.size == 10
    assert 0.5 <= np.abs(weights).min() < np.abs(weights).max() <= 1.5
    assert weights.min() < 0 < weights.max()


@pytest.mark.slow
def test_growth_by_gradients_finds_the_teacher_and_by_the_smallest_does_not():
    rows = ("static", "SET", "RigL", "RigL, smallest gradients")
    grows = ("nothing", "random", "gradient", "smallest")
    made = {
        row: support.run(support.Config(grow=grow), None).expand_dims(seed=[0])
        for row, grow in zip(rows, grows, strict=True)
    }
    claims = verdicts(tables.SUPPORT, tables.SUPPORT.reduce(made))
    assert all(claim.holds for claim in claims.values()), claims
    # Its weights are then learned as far as the noise lets them be.
    assert made["RigL"]["error"] < 0.01 < made["SET"]["error"]


@pytest.fixture(scope="module")
def learned():
    """A perceptron on digits that is pruned in every way."""
    cfg = one_shot.Config(
        model=MlpConfig(widths=(32,)),
        exclude=(),
        steps=80,
        rounds=1,
        batch_size=64,
        optimizer=SgdConfig(lr=0.1, momentum=0.9),
        more_damping=1e-3,
    )
    return one_shot.run(cfg, types.SimpleNamespace(data_root=None))


@pytest.mark.slow
@pytest.mark.acceptance("sparsity", 13)
def test_curvature_prunes_better_than_magnitude_and_tickets_learn(learned):
    """With a damping of 1e-3: gradients of a network that has learned are small."""
    found = learned.sel(variant="woodfisher, damped")
    plain = learned.sel(variant="magnitude")
    assert found["loss"] < plain["loss"]
    assert found["val_loss"] < plain["val_loss"]
    assert learned["kept"].values == pytest.approx(
        [1.0, 0.2, 0.2, 0.2, 0.1, 0.1, 0.1], abs=1e-3
    )
    accuracy = learned["accuracy"]
    assert accuracy.sel(variant="rewound") > accuracy.sel(variant="drawn again") - 0.5
    assert accuracy.sel(variant="rewound") > accuracy.sel(variant="untrained") + 10


def test_pruning_at_once_is_judged_seed_by_seed():
    base = np.ones((5, len(one_shot.VARIANTS)))
    better = base.copy()
    better[:, one_shot.VARIANTS.index("woodfisher")] = 0.9
    run = rows.run(
        {"variant": one_shot.VARIANTS},
        seeds=range(5),
        accuracy=("variant", base[0]),
        kept=("variant", 0.2 * base[0]),
    )

    def judge(loss):
        losses = dict.fromkeys(("loss", "val_loss"), (("seed", "variant"), loss))
        table = tables.one_shot({"digits": run.assign(losses)})
        assert table["sparsity"].sel(row="woodfisher") == pytest.approx(80)
        return verdicts(tables.ONE_SHOT, table)

    assert all(claim.holds for claim in judge(better).values())
    better[3] = 1.0
    claims = judge(better)
    assert claims["woodfisher"] == claims["woodfisher, held out"] == (4.0, False)
    assert claims["rewinding"] == (0.0, True)
