import jax
import pytest
from jax.errors import KeyReuseError


def twice(key):
    return jax.random.normal(key) + jax.random.uniform(key)


def twice_inside(x):
    return x + twice(jax.random.key(1))


def calls_twice(key):
    draw = jax.jit(lambda key, x: x + jax.random.normal(key))
    return draw(key, 1.0) + draw(key, 1.0)


def holds_it(key):
    draw = jax.jit(lambda x: x + jax.random.normal(key))
    return draw(1.0) + draw(1.0)


def scans(key):
    def body(total, _):
        return total + jax.random.normal(key), None

    return jax.lax.scan(body, 0.0, None, 3)[0]


def branches(key):
    return jax.lax.cond(True, lambda: twice_inside(1.0), lambda: 0.0)


def takes_a_part(key):
    keys = jax.random.split(key, 3)
    return jax.random.normal(keys[0]) + jax.random.normal(keys[0])


REUSES = [
    *(twice, jax.jit(twice), calls_twice, holds_it, scans, branches, takes_a_part),
    lambda key: jax.jit(twice_inside)(1.0),
    lambda key: jax.grad(jax.jit(branches))(1.0),
    lambda key: jax.vmap(twice)(jax.random.split(key, 3)),
    lambda key: twice(jax.device_put(key)),
]


@pytest.mark.parametrize("reuse", REUSES)
def test_a_key_that_is_used_twice_is_found(reuse):
    with pytest.raises(KeyReuseError):
        reuse(jax.random.key(0))


def test_a_program_without_keys_takes_the_fast_path():
    double = jax.jit(lambda x: 2 * x)
    assert double(1.0) == 2
    with jax.no_tracing():
        assert double(2.0) == 4
    assert double._cache_size() == 1
