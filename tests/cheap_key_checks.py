"""Has JAX look for keys that are used twice only where there are keys.

`jax_debug_key_reuse` takes JAX's fast path from every call and looks through each
equation of each program, which took a sixth of some files' time; few hold keys.
"""

import functools
import types

import jax
from jax._src import core, pjit
from jax._src.random import prng
from jax._src.util import weakref_lru_cache
from jax.experimental.key_reuse import _core as checks


@functools.cache
def _is_key(dtype):
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


@weakref_lru_cache
def _in_program(jaxpr):
    """Says whether a program, or one within, takes, makes or returns a key."""
    variables = [*jaxpr.invars, *jaxpr.constvars]
    variables += [each for eqn in jaxpr.eqns for each in eqn.outvars]
    return any(_is_key(getattr(each.aval, "dtype", None)) for each in variables) or any(
        _in_params(eqn.params) for eqn in jaxpr.eqns
    )


def _in_params(params):
    return any(map(_in_program, core.jaxprs_in_params(params)))


_signature, _checked, _run = (
    checks.jaxpr_type_signature,
    checks.call_impl_with_key_reuse_checks,
    pjit._run_python_pjit,
)
# The same, told that nothing is checked; the setting itself is part of caches' keys.
_off = types.SimpleNamespace(debug_key_reuse=types.SimpleNamespace(value=False))
_run_fast = types.FunctionType(_run.__code__, {**vars(pjit), "config": _off})


def _signature_if_keys(jaxpr):
    return _signature(jaxpr) if _in_program(jaxpr) else checks.KeyReuseSignature()


def _checked_if_keys(primitive, run, /, *args, **params):
    if (
        primitive.name.startswith("random_")
        or any(isinstance(each, prng.PRNGKeyArray) for each in args)
        or _in_params(params)
    ):
        return _checked(primitive, run, *args, **params)
    return run(*args, **params)


def _run_fast_without_keys(called, *args):
    return (_run if _in_params(called.params) else _run_fast)(called, *args)


def install():
    """Puts the shorter ways in the place of JAX's own."""
    checks.jaxpr_type_signature = _signature_if_keys
    checks.call_impl_with_key_reuse_checks = _checked_if_keys
    pjit._run_python_pjit = _run_fast_without_keys
