"""Eight simulated CPU devices and one cache of compiled programs for the suite."""

import contextlib
import functools
import gc
import importlib.metadata
import os
import pathlib
import signal
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs here run once or twice; to compile them is what the suite spends its time on.
# JAX 0.11 does without the last flag, and does not know it. On a GPU, where kernels are
# tested before they are timed, programs are compiled as for everybody.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        *(
            f"{flag}={value}"
            for flag, value in {
                "--xla_force_host_platform_device_count": 8,
                "--xla_backend_optimization_level": 0,
                "--xla_cpu_parallel_codegen_split_count": 1,
                "--xla_cpu_use_fusion_emitters": False,
            }.items()
            if "cuda" not in os.environ["JAX_PLATFORMS"]
            and flag not in os.environ.get("XLA_FLAGS", "")
            and (value is not False or importlib.metadata.version("jaxlib") < "0.11")
        ),
    ]
).strip()

# Workers of xdist say 80; a command in a pipe is as wide as for everybody.
os.environ.pop("COLUMNS", None)

# Each operation of a program else carries ten frames of the stack, for profilers.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

# A shell's background job is started with it ignored, and so would be what tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import filelock
import hypothesis
import jax
import jaxtyping
import pytest
from jax._src.interpreters import mlir

from hpcjax.core.compile_cache import keep_compiled
from tests import (
    cheap_key_checks,
    cpu_report,
    failures_at_once,
    type_check,
    without_triton,
)

# Tracing leaves many objects that stay: looking through them again and again took a
# tenth of the time.
gc.set_threshold(20_000, 50, 100)
# Examples compile: the first one takes longer than any sensible deadline.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")

REPOSITORY = pathlib.Path(__file__).parent.parent
# A root of its own: what imports it has been told where it is.
collect_ignore = ["toy"]
LOCK = pathlib.Path(tempfile.gettempdir(), f"hpcjax-tests-{os.getuid()}.lock")


def _shaped() -> list[str]:
    """Names of the modules that state the shapes of arrays."""
    return [
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for path in sorted((REPOSITORY / "hpcjax").rglob("*.py"))
        if "from jaxtyping import" in path.read_text()
    ]


# `make test-all` checks types there. Modules that state no shapes are left to pyrefly:
# a check takes tens of microseconds a call, most of the time of some tests.
if os.environ.get("HPCJAX_CHECK_TYPES"):
    # Who takes an array takes NumPy's, too, and a number for one without a dimension.
    jaxtyping.Array = jax.typing.ArrayLike
    jaxtyping.install_import_hook(_shaped(), f"{type_check.__name__}.check")

# For each program JAX makes a context of MLIR and loads all dialects into it, which
# takes longer than to lower most programs here: a fifth of the suite's time.
mlir.make_ir_context = functools.cache(mlir.make_ir_context)
# Every program is kept, also for the processes that tests start: most are small, and
# the user's next suite, in whatever clone, compiles nothing.
keep_compiled()
if folder := jax.config.values["jax_compilation_cache_dir"]:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
jax.config.update("jax_debug_key_reuse", True)
cheap_key_checks.install()
jax.config.update("jax_numpy_rank_promotion", "allow")


def pytest_configure(config: pytest.Config) -> None:
    """Has the suite say where its time goes and what fails, and do without Triton."""
    config.pluginmanager.register(cpu_report)
    config.pluginmanager.register(without_triton)
    config.pluginmanager.register(failures_at_once)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before a test's timeout begins to run
def pytest_runtest_protocol(item):
    """Tests of processes run one after the other, whichever workers have them."""
    alone = item.get_closest_marker("processes")
    with filelock.FileLock(LOCK) if alone else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config, items):
    """Tests of processes, and they alone, are run once more if they fail.

    Of a test that is marked `quick` the other parameters are slow.
    """
    unknown = {}
    for item in items:
        if item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.flaky(reruns=1))
        if quick := item.get_closest_marker("quick"):
            test = item.nodeid.partition("[")[0]
            unknown.setdefault(test, set(quick.args)).discard(item.callspec.id)
            if item.callspec.id not in quick.args:
                item.add_marker(pytest.mark.slow)
    unknown = {name: ids for name, ids in unknown.items() if ids}
    if unknown and not any("[" in asked for asked in config.args):
        raise pytest.UsageError(f"`quick` names what is no parameter: {unknown}")


COMPILATIONS: list[str] = []


def _count(event: str, seconds: float, **_: object) -> None:
    if "backend_compile" in event:
        COMPILATIONS.append(event)


jax.monitoring.register_event_duration_secs_listener(_count)


@pytest.fixture
def compilations() -> list[str]:
    """One entry for every program compiled since the test began."""
    COMPILATIONS.clear()
    return COMPILATIONS


@pytest.fixture(autouse=True)
def _types(request):
    """Leaves it to the product to refuse what a test marked `wrong` gives it."""
    off = request.node.get_closest_marker("wrong") is not None
    jaxtyping.config.update("jaxtyping_disable", off)


@pytest.fixture(scope="module", autouse=True)
def _modules_of_the_repository():
    """Puts experiments and configs back where a file's tests used another root.

    Such a root makes the process forget the repository's modules; other files hold what
    they imported of them before, and a module imported anew holds other objects.
    """
    # Not at the top: the import hook comes first.
    from hpcjax.core import parts
    from hpcjax.runs import discover

    before = _modules()
    yield
    discover.activate(REPOSITORY)
    for name in set(_modules()) - set(before):
        del sys.modules[name]
        parent, _, child = name.rpartition(".")
        if parent in before:  # else `from parent import child` would still find it
            vars(before[parent]).pop(child, None)
    for name, module in before.items():
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    # What is cached of the parts' classes is of modules that were imported anew.
    parts.list_of_root({})
    discover.activate(REPOSITORY)


@pytest.fixture(scope="module", autouse=True)
def _room_for_programs():
    """Forgets programs before they fill the process's table of mappings.

    Linux allows 65,530, a program on the CPU takes dozens, a file of tests up to 20,000
    in all, and XLA dies without a word where there is no room for one. With 25,000 a
    process holds 7 GB; what is wanted again is read from the cache of programs.
    """
    # Not at the top: the import hook comes first.
    from hpcjax.runs import training

    yield
    # A task that is composed again would not show what a test has put in the place of
    # a part's function.
    training._newest.clear()
    mlir.make_ir_context.cache_clear()  # it holds the constants of all programs
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 12_000:
        jax.clear_caches()
        gc.collect()


def _modules():
    """The imported modules of experiments and configs, by name."""
    return {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] in ("experiments", "configs")
    }
