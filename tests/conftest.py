"""Eight simulated CPU devices and one cache of compiled programs for the suite."""

import gc
import importlib.metadata
import os
import pathlib
import sys

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

from hpcjax.core.compile_cache import compile_cache, keep_compiled

# Every program is kept, also for the processes that tests start: most are small, and
# the user's next suite, in whatever clone, compiles nothing.
os.environ.update(
    {"JAX_COMPILATION_CACHE_DIR": str(folder)} if (folder := compile_cache()) else {}
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Each operation of a program else carries ten frames of the stack, for profilers.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

import hypothesis
import jax
import jaxtyping
import pytest

from tests import cpu_report, failures_at_once, without_triton

# Tracing leaves many objects that stay: looking through them again and again took a
# tenth of the time.
gc.set_threshold(20_000, 50, 100)
# Examples compile: the first one takes longer than any sensible deadline.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")

REPOSITORY = pathlib.Path(__file__).parent.parent


def _shaped() -> list[str]:
    """Names of the modules that state the shapes of arrays."""
    return [
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for path in sorted((REPOSITORY / "hpcjax").rglob("*.py"))
        if "from jaxtyping import" in path.read_text()
    ]


# Types are checked there when tests run. Modules that state no shapes are left to
# pyrefly: a check takes tens of microseconds a call, most of the time of some tests.
jaxtyping.install_import_hook(_shaped(), "beartype.beartype")

keep_compiled()  # a test that is killed leaves no half of a program there
jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_numpy_rank_promotion", "allow")


def pytest_configure(config: pytest.Config) -> None:
    """Has the suite say where its time goes and what fails, and do without Triton."""
    config.pluginmanager.register(cpu_report)
    config.pluginmanager.register(without_triton)
    config.pluginmanager.register(failures_at_once)


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


@pytest.fixture(scope="module", autouse=True)
def _modules_of_the_repository():
    """Puts experiments and configs back where a file's tests used another root.

    Such a root makes the process forget the repository's modules; other files hold what
    they imported of them before, and a module imported anew holds other objects.
    """
    # Not at the top: the import hook comes first.
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
