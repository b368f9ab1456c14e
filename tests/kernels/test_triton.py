"""How kernels are run, interpreted and chosen, for a kernel of the tests' own."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from hpcjax import kernels
from hpcjax.core import ConfigError, UnsupportedOp, compat
from hpcjax.core.varying import varying_axes
from hpcjax.kernels import _dispatch
from hpcjax.kernels._triton import launch

OPERATION = "select_above"
needs_triton = pytest.mark.skipif(
    launch.find_problem(interpreted=True) is not None,
    reason="`make kernels` has not been called",
)


def twice(x):
    """2x by a kernel of 4 programs' width, interpreted."""
    plan = launch.Launch(
        kernel="tests.kernels.kernel:double",
        grid=(-(-len(x) // 4), 1, 1),
        outputs=(jax.ShapeDtypeStruct(x.shape, x.dtype),),
        constants={"SIZE": len(x), "BLOCK": 4},
    )
    return launch.run(plan, x, interpreted=True)[0]


@pytest.mark.quick("uint32", "float32")
@needs_triton
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32"])
def test_a_kernel_runs_under_jit_vmap_and_remat(dtype):
    x = jnp.arange(7).astype(dtype)
    for run in (twice, jax.jit(twice), jax.jit(jax.checkpoint(twice))):
        np.testing.assert_array_equal(run(x), x + x)
    several = jnp.stack([x, 3 * x])
    np.testing.assert_array_equal(jax.vmap(twice)(several), 2 * several)


@needs_triton
def test_a_result_differs_between_devices_as_its_inputs_do():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    seen = []

    def local(x):
        y = twice(x)
        seen.append(varying_axes(y))
        return y

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
    np.testing.assert_array_equal(run(jnp.arange(10.0)), 2 * jnp.arange(10.0))
    assert seen == [frozenset({"d"})]


def test_what_is_named_is_never_replaced(monkeypatch):
    choose = _dispatch.choose
    assert choose(OPERATION, "reference", unsupported="too odd") == "reference"
    with pytest.raises(UnsupportedOp, match=r"'triton': the device is a cpu"):
        choose(OPERATION, "triton")
    monkeypatch.setattr(launch, "_find_missing", lambda package: None)
    for name in ("triton", "interpreted"):
        with (
            launch.compiling_for(90),
            pytest.raises(UnsupportedOp, match=f"{OPERATION}.*'{name}': too odd"),
        ):
            choose(OPERATION, name, unsupported="too odd", slower="too long")
    with launch.compiling_for(90):
        assert choose(OPERATION, "triton", slower="too long") == "triton"
    with pytest.raises(ConfigError, match="did you mean 'triton'"):
        choose(OPERATION, "tritom")


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    def fails(package):
        raise ImportError(f"no module {package}")

    monkeypatch.setattr(launch.importlib, "import_module", fails)
    launch._find_missing.cache_clear()
    message = r"triton does not load \(no module triton\): pip install 'hpcjax\[gpu\]'"
    with pytest.raises(UnsupportedOp, match=message):
        _dispatch.choose(OPERATION, "interpreted")
    with launch.compiling_for(90):
        assert _dispatch.choose(OPERATION, "auto") == "reference"
    launch._find_missing.cache_clear()


def test_auto_says_once_what_it_takes_and_why(monkeypatch, caplog):
    _dispatch._log_choice.cache_clear()
    monkeypatch.setattr(launch, "_find_missing", lambda package: None)
    choose = _dispatch.choose
    with caplog.at_level(logging.INFO, _dispatch.__name__):
        for _ in range(2):
            assert choose(OPERATION, "auto") == "reference"
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        assert choose(OPERATION, "auto") == "triton"
        assert choose(OPERATION, "auto", unsupported="too odd") == "reference"
        assert choose(OPERATION, "auto", slower="too long") == "reference"
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"{OPERATION} takes implementation='reference': the device is a cpu",
        f"{OPERATION} takes implementation='triton': the device is a gpu",
        f"{OPERATION} takes implementation='reference': too odd",
        f"{OPERATION} takes implementation='reference': too long",
    ]


def test_what_would_run_here():
    found = {each.operation: each for each in kernels.choices_here()}
    assert set(found) == set(_dispatch.OPERATIONS)
    assert found["clustered_attention"].implementation == "blocked"
    assert {each.reason for each in found.values()} == {"the device is a cpu"}


@pytest.mark.parametrize(("version", "name"), [("0.3.1", "shape"), ("0.4.1", "type")])
def test_names_of_arguments_that_versions_differ_in(monkeypatch, version, name):
    monkeypatch.setattr(compat, "version", {"jax-triton": version}.get)
    assert compat.triton_options(())[f"out_{name}"] == ()
