"""One process of a data-parallel training; run by test_processes.py.

Arguments: process index, process count, coordinator port, file for the result.
"""

import json
import os
import pathlib
import signal
import sys

from hpcjax.core.errors import HpcjaxError


def main(index: int, count: int, port: int, file: pathlib.Path) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = ""

    import jax

    jax.config.update("jax_num_cpu_devices", 4 // count)
    if count > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", count, index)

    import optax

    from hpcjax import sharding, train
    from hpcjax.core import trees
    from tests.data import test_shared_batches
    from tests.train import test_step, tiny

    rows = 16
    match file.stem:
        case "sparse":
            task = test_step.sparse_task()
        case "values":  # of a weight each, and a last batch that is short
            task, batch = test_shared_batches.averaging_values()
            rows = len(batch["x"])
        case _:
            task = tiny.task(optax.adam(0.1))
    config = train.TrainConfig(steps=12, batch_size=rows, eval_every=5)
    records, mesh = tiny.Records(), sharding.data_mesh()

    def stop() -> int:  # only one process of them is told
        told = file.stem == "stopped" and index == count - 1
        return signal.SIGTERM if told and any(r["step"] >= 5 for r in records) else 0

    with train.Checkpoints(file.parent / f"{file.stem}-checkpoints") as checkpoints:
        state = train.fit(
            task,
            config,
            seed=3,
            mesh=mesh,
            recorder=records,
            checkpoints=checkpoints,
            stop=stop,
        )
        restored = checkpoints.restore(train.state_shapes(task, mesh), mesh=mesh)
    assert restored.step == config.steps
    params, back = trees.flatten(state.params), trees.flatten(restored.state.params)
    for path, leaf in params.items():
        assert (jax.device_get(leaf) == jax.device_get(back[path])).all(), path
    if index == 0:
        values = {path: jax.device_get(leaf).tolist() for path, leaf in params.items()}
        file.write_text(json.dumps({"params": values, "records": records.values()}))


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:4]), pathlib.Path(sys.argv[4]))
    except HpcjaxError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
