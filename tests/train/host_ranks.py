"""What the processes of `test_host_step` do: train, lose checkpoints, and go on."""

import pathlib

WORKERS = 2
REPEATABLE = ("local_sgd", "sgp", "sync")


def configs():
    """Those that wait, whose runs can be repeated, and those that do not."""
    from hpcjax.averaging import (
        EagerConfig,
        LateConfig,
        LocalSgdConfig,
        SgpConfig,
        WagmaConfig,
    )

    own = {"workers": WORKERS, "between": "processes"}
    late = LateConfig(base=0.0, delay=0.05)
    return {
        "local_sgd": LocalSgdConfig(period=3, warm_start=3, **own),
        "sgp": SgpConfig(**own),
        "sync": EagerConfig(mode="sync", **own),
        "wagma": WagmaConfig(group_size=2, tau=8, late=late, **own),
    }


def train_and_go_on(transport, folder):
    """Returns by method what a whole run, and one that has lost a part, were like.

    The second worker loses the checkpoint of step 7, so that both go on from step 5.
    """
    told = {}
    for name, config in configs().items():
        place = pathlib.Path(folder) / name / str(transport.rank)
        told[name] = {"cut": fit(transport, config, place, steps=7)}
        if transport.rank == 1:
            (place / "7" / "MANIFEST.json").unlink()
        told[name]["again"] = fit(transport, config, place)
        if name in REPEATABLE:
            told[name]["whole"] = fit(transport, config, place / "whole")
    return told


def go_on_without(transport, folder):
    """Goes on where one worker has no good checkpoint at all; returns what it says."""
    from hpcjax.core.errors import CheckpointCorrupt, ProcessLost

    config, place = configs()["sync"], pathlib.Path(folder) / str(transport.rank)
    fit(transport, config, place, steps=7)
    if transport.rank == 1:
        for step in (5, 7):
            (place / str(step) / "MANIFEST.json").unlink()
    try:
        fit(transport, config, place)
    except (CheckpointCorrupt, ProcessLost) as error:
        return f"{type(error).__name__}: {error}"


def fit(transport, averaged, folder, steps=12):
    """Trains, with checkpoints after steps 5 and 10 and the last."""
    import numpy as np

    from hpcjax import train
    from hpcjax.optim import SgdConfig
    from tests.train import tiny

    plain = tiny.task()
    method = train.compose(
        plain.model,
        plain.dataset,
        SgdConfig(lr=0.1, momentum=0.9),
        averaged=averaged,
        batch_size=24,
        steps=12,
        transport=transport,
    )
    task, records = train.supervised(plain.model, method, plain.dataset), tiny.Records()
    config = train.TrainConfig(
        steps=steps, batch_size=24, eval_every=6, checkpoint_every=5, keep=2
    )
    with train.Checkpoints(folder, keep=2) as checkpoints:
        state = train.fit(
            task,
            config,
            seed=0,
            mesh=task.mesh(1),
            recorder=records,
            checkpoints=checkpoints,
        )
    trained = [record for record in records if "loss" in record]
    return {
        "steps": np.array([record["step"] for record in trained]),
        "loss": np.array([record["loss"] for record in trained]),
        "kernel": np.asarray(state.params["dense"]["kernel"]),
        "traces": [[first, *trace] for first, trace in task.method.around.traces],
    }
