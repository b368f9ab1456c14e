"""Eight simulated CPU devices and one compilation cache for the whole suite."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs here run once or twice and are compiled faster so. Not 0: with it a model's
# gradients came out as NaN.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        *(
            f"{flag}={value}"
            for flag, value in {
                "--xla_force_host_platform_device_count": 8,
                "--xla_backend_optimization_level": 1,
            }.items()
            if flag not in os.environ.get("XLA_FLAGS", "")
        ),
    ]
).strip()

import hypothesis
import jax
import pytest

# Examples compile: the first one takes longer than any sensible deadline.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")

CACHE = pathlib.Path(__file__).parent.parent / ".cache" / "jax"
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_numpy_rank_promotion", "allow")


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
