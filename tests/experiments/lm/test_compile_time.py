"""`lm/compile-time` with a tiny model, in seconds of the processor: others may work."""

import functools
import time

import pytest

from experiments.lm import compile_time
from experiments.lm.tables import COMPILING
from hpcjax import perf
from hpcjax.models import CausalLmConfig
from tests.experiments import rows


@pytest.mark.slow
@pytest.mark.acceptance("lm-models", 8)
def test_48_blocks_compile_as_fast_as_4_unless_each_is_compiled_by_itself(monkeypatch):
    ours = functools.partial(perf.compile_seconds, clock=time.process_time)
    monkeypatch.setattr(perf, "compile_seconds", ours)
    cfg = compile_time.Config(
        model=CausalLmConfig(width=8, heads=2),
        context=4,
        vocabulary=11,
        repetitions=1,
    )
    run = compile_time.run(cfg, None).expand_dims(seed=[0])
    table = COMPILING.reduce({"all": run})
    found = rows.verdicts(COMPILING, table)
    assert found["gradient"].holds
    assert found["instructions"].holds
    unrolled = table.sel(row="48 blocks, token, layer by layer")
    assert unrolled["ratio"] >= 2
    assert unrolled["instructions"] >= 2 * table["instructions"].sel(
        row="4 blocks, token, layer by layer"
    )
