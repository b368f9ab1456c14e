"""Units as files spell them, and how values of one become those of another."""

import functools
import importlib.util
import re
from typing import Any

from hpcjax.core.errors import DataMissing

# Such as "deg C", "degrees_Celsius" and "kelvin".
_DEGREES = re.compile(
    r"(?:°|deg(?:ree)?s?)?[ _]?([CFK])(?:elsius|ahrenheit|elvin)?", re.IGNORECASE
)
# What is no unit of Pint's, or another one there, such as its coulomb and millibarn.
_NAMES = {
    **dict.fromkeys(("gpm", "geopotential meter", "metre", "meter", "meters"), "m"),
    **dict.fromkeys(("mb", "mbar", "millibar", "millibars", "hectopascal"), "hPa"),
    **dict.fromkeys(("pascal", "pascals", "Pascal", "Pascals"), "Pa"),
    **dict.fromkeys(("kg kg-1", "g g-1", "(0 - 1)"), "1"),
    **{"gpdm": "dam", "℃": "degC", "J kg-1": "m2 s-2"},
}
# Those that most files have, for which nothing needs to be installed.
_CHANGES = {
    ("degC", "K"): (1.0, 273.15),
    ("g kg-1", "1"): (1e-3, 0.0),
    ("hPa", "Pa"): (100.0, 0.0),
    ("Pa", "hPa"): (0.01, 0.0),
    ("mm", "m"): (1e-3, 0.0),
    ("dam", "m"): (10.0, 0.0),
}


def spell(units: str) -> str:
    """Returns a unit as UDUNITS spells it, such as "m2 s-2" for "m**2/s^2"."""
    if degrees := _DEGREES.fullmatch(units.strip()):
        letter = degrees[1].upper()
        return "K" if letter == "K" else f"deg{letter}"
    text = re.sub(r"\*\*|\^", "", _NAMES.get(units.strip(), units.strip()))
    text = re.sub(r"\s*/\s*([A-Za-z]+)(\d*)", lambda m: f" {m[1]}-{m[2] or 1}", text)
    text = re.sub(r"(?<=\w)[.*·](?=[A-Za-z])", " ", text)
    text = re.sub(r"^1 +(?=\S)", "", text.strip())
    return _NAMES.get(text, text)


def is_pressure(units: str) -> bool:
    """Whether a unit is one of pressure."""
    return spell(units) in ("Pa", "hPa", "kPa", "bar")


def find_change(given: str, unit: str) -> tuple[float, float] | None:
    """Returns factor and offset from a unit to another, None if it is not like that.

    Raises:
      DataMissing: Pint is needed for them, and not installed.
    """
    pair = spell(given), spell(unit)
    if pair[0] == pair[1]:
        return 1.0, 0.0
    if pair in _CHANGES:
        return _CHANGES[pair]
    if importlib.util.find_spec("pint") is None:
        raise DataMissing(
            f"units {given!r} are converted by pint: pip install 'hpcjax[weather]'"
        )
    zero, one = (_convert(value, *pair) for value in (0.0, 1.0))
    return None if zero is None or one is None else (float(f"{one - zero:.12g}"), zero)


def _convert(value: float, given: str, unit: str) -> float | None:
    registry, parsed = _registry(), []
    try:
        for text in (given, unit):
            power = re.sub(r"(?<=[A-Za-z])(?=-?\d)", "**", text)
            parsed.append(registry.parse_units(power.replace(" ", "*")))
        return float(registry.Quantity(value, parsed[0]).to(parsed[1]).magnitude)
    except Exception:  # what no unit is fails in Pint's reader in many ways
        return None


@functools.cache
def _registry() -> Any:
    import pint

    return pint.UnitRegistry()
