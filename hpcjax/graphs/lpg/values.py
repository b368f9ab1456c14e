"""The values of a key that become features, checked one by one."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd

from hpcjax.core.errors import ConfigError
from hpcjax.graphs.lpg import words
from hpcjax.graphs.lpg.spec import KeySpec, present


@contextlib.contextmanager
def tell_key(spec: KeySpec) -> Iterator[None]:
    """Says in an error which key cannot be of its kind."""
    try:
        yield
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{spec.key} cannot be {spec.kind}: {error}") from error


def take_values(table: pd.DataFrame, spec: KeySpec, length: int = 0) -> pd.Series:
    """Returns the values of a key, checked; vectors by `length`, or the first's."""
    if spec.key not in table.columns:
        raise ConfigError(
            f"the graph has no key {spec.key!r}, of which there are features"
        )
    values = present(table, spec.key)
    if spec.kind == "vector" and len(values):
        length = length or np.size(values.iloc[0])
        rule = f"lists of {length} finite numbers"
        _check_each(table, values, rule, lambda value: _is_vector(value, length))
    if spec.kind == "point":
        rule = "points of a latitude within 90 degrees and a finite longitude"
        _check_each(table, values, rule, _is_point)
    return values


def _check_each(
    table: pd.DataFrame, values: pd.Series, rule: str, good: Callable[[Any], bool]
) -> None:
    """Raises ConfigError with the first value that is not good, and whose it is."""
    ids = table["_id"] if "_id" in table else table.index.to_series()
    for name, value in zip(ids.loc[values.index], values, strict=True):
        if not good(value):
            raise ConfigError(
                f"{values.name} must be {rule}: got {value!r:.60} (of {name}); correct "
                "it, or leave the key out"
            )


def _is_vector(value: Any, length: int) -> bool:
    numbers = isinstance(value, words.LISTS) and all(map(_is_finite, value))
    return numbers and len(value) == length


def _is_point(value: Any) -> bool:
    place = value if isinstance(value, dict) else {}
    latitude, longitude = place.get("latitude", ""), place.get("longitude", "")
    return _is_finite(latitude) and _is_finite(longitude) and abs(latitude) <= 90


def _is_finite(value: Any) -> bool:
    real = isinstance(value, int | float | np.integer | np.floating)
    return real and not isinstance(value, bool) and math.isfinite(value)
