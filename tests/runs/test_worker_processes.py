"""What workers in processes have kept, as one history."""

import math

import numpy as np

from hpcjax.runs import worker_processes
from hpcjax.runs.metrics import Metrics


def test_what_one_worker_lacks_is_not_hidden_by_the_others(tmp_path):
    for own, second in ((tmp_path, 2.0), (tmp_path / "workers" / "1", math.nan)):
        own.mkdir(parents=True, exist_ok=True)
        metrics = Metrics(own / "metrics.jsonl")
        for step, loss in enumerate((4.0, second), 1):
            metrics.write({"step": step, "seconds": 1.0 * step, "loss": loss})
    joined = worker_processes._join(tmp_path, 2)
    np.testing.assert_array_equal(joined["loss"], [4.0, np.nan])
    assert joined["worker_seconds"].values.tolist() == [2.0, 2.0]
