"""Models and their steps as graphs: what a run leaves, and that a step is the step."""

import json
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.sdfg import functions, model
from hpcjax import ir
from hpcjax.models import MlpConfig
from hpcjax.runs import training

CONFIG = model.Config(model=MlpConfig(widths=(4,)), what="step", batch_size=3)


def read(cfg):
    task = training.task(cfg.training(), pathlib.Path())
    return task, *functions.of_task(task, cfg.what, cfg.batch_size)


@pytest.mark.slow
def test_a_step_as_a_graph_is_the_step():
    task, step, *shapes = read(CONFIG)
    rng = np.random.default_rng(0)
    params, state = task.model.init(jax.random.key(0))
    batch = {
        name: jnp.asarray(rng.integers(0, 9, like.shape), like.dtype)
        for name, like in shapes[2].items()
    }
    args = params, state, batch, jax.random.key(1)
    program = ir.from_jax(step, *shapes)
    fused = program.rewrite(ir.simplify).rewrite(ir.fuse_maps)
    wanted, found = jax.jit(lambda *a: (step(*a), fused.to_jax()(*a)))(*args)
    moved = 0.0
    trees = map(jax.tree.leaves, (wanted[0], found[0], params))
    for one, other, old in zip(*trees, strict=True):
        np.testing.assert_allclose(one, other, 0, 1e-6)
        moved = max(moved, float(jnp.abs(one - old).max()))
    assert moved > 1e-3


def test_a_run_leaves_its_history_its_words_and_a_picture(tmp_path):
    directory = types.SimpleNamespace(path=str(tmp_path))
    found = model.run(
        CONFIG, types.SimpleNamespace(data_root=tmp_path, directory=directory)
    )
    kept = json.loads((tmp_path / "history.json").read_text())
    _, *function = read(CONFIG)
    first = ir.from_jax(*function)
    assert kept["words"]["read"] == first.words()
    made = ir.replay(kept["history"], first.graph)
    assert first.rewrite(lambda _: made).words() == kept["words"]["fused"]
    assert sum(kept["words"]["fused"].values()) < sum(kept["words"]["read"].values())
    assert found["rules"] == len(kept["history"]) - 1
    share = found["words"].sel(stage="read") * found["words_listed"]
    opaque = share.sel(operation="opaque").round()
    assert opaque == first.opaque_words() > 0
    assert (tmp_path / "words.png").stat().st_size > 1000
