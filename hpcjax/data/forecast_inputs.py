"""What a network sees of forecasts beside the target: leads, levels, statistics."""

import itertools
import logging
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xarray as xr

from hpcjax.core.errors import DataFormatError
from hpcjax.data.source import Augment, Batch

if TYPE_CHECKING:
    from hpcjax.data.ens10 import MembersConfig

log = logging.getLogger(__name__)
# The place of a point is in the last channels.
PLACE = 3
# Least deviation over an area, in a variable's standard unit.
_LEAST = 1e-3
HOUR = np.timedelta64(1, "h")
_NORTHWARD = re.compile(r"(\S+ h )?(\S+ hPa )?(mean|control|analysis) v(10)?")


class Block(NamedTuple):
    """Fields of one lead and level.

    Attributes:
      members: variables [number, time, latitude, longitude].
      name: such as "24 h 500 hPa".
      start: the same variables of the truth when forecasts start, or None.
    """

    members: xr.Dataset
    name: str = ""
    start: xr.Dataset | None = None


def find_blocks(
    forecast: xr.Dataset,
    truth: xr.Dataset | None,
    members: xr.Dataset,
    lead: np.timedelta64,
    cfg: "MembersConfig",
) -> tuple[tuple[Block, ...], tuple[int, int], np.timedelta64]:
    """Returns blocks lead by lead, level by level, how many of either, and the lead.

    Args:
      forecast: with canonical names.
      truth: likewise; None for forecasts of which nothing is known yet.
      members: those of the target's lead and level.
      lead: the target's.
      cfg: which leads and levels.

    Raises:
      DataFormatError: a lead or level that is not there, or no truth at the start.
    """
    names = list(members)
    leads = sorted({lead, *(hours * HOUR for hours in cfg.leads)})
    have = np.atleast_1d(forecast["lead_time"]) if "lead_time" in forecast else [lead]
    if set(leads) - set(have):
        told = ", ".join(f"{each / HOUR:g}" for each in have)
        raise DataFormatError(
            f"leads must be among those of the forecasts, {told} hours: got "
            f"{', '.join(map(str, cfg.leads))}"
        )
    levels: list[Any] = [members.coords["level"].item() if "level" in members else None]
    if cfg.levels == "all":
        levels = np.sort(np.atleast_1d(forecast.get("level", []))).tolist()
        if len(levels) < 2 or None in levels or "level" not in members.coords:
            raise DataFormatError(
                f"levels='all' must be of two levels or more: found {levels}"
            )
    start = _find_start(truth, names, members) if cfg.analysis else None
    chosen = forecast[names]
    if "lead_time" in chosen.dims:
        chosen = chosen.sel(lead_time=leads)
    if chosen.nbytes < 2 << 30:
        chosen = chosen.load()  # once, rather than for each block
    blocks = [
        Block(
            _select(chosen, lead_time=each, level=level),
            f"{each / HOUR:g} h" + (f" {level:g} hPa" if level else ""),
            None if start is None else _select(start, level=level),
        )
        for each, level in itertools.product(leads, levels)
    ]
    return tuple(blocks), (len(leads), len(levels)), lead


def _select(fields: xr.Dataset, **at: Any) -> xr.Dataset:
    return fields.sel({dim: each for dim, each in at.items() if dim in fields.dims})


def _find_start(
    truth: xr.Dataset | None, names: list[Any], members: xr.Dataset
) -> xr.Dataset:
    from hpcjax.metrics.fields import find_truth

    if truth is None:
        raise DataFormatError("analysis: the truth when forecasts start must be given")
    lacking = [str(name) for name in names if name not in truth]
    if lacking:
        raise DataFormatError(f"analysis: the truth has no {', '.join(lacking)}")
    times, now = members["time"].to_numpy(), np.timedelta64(0, "h")
    return xr.Dataset({name: find_truth(truth[name], times, now) for name in names})


def name_statistics(cfg: "MembersConfig") -> list[str]:
    """Returns what stands of each variable, in this order."""
    more = [name for name in ("control", "analysis") if getattr(cfg, name)]
    return ["mean", "deviation", *more]


def summarise(members: np.ndarray, start: np.ndarray | None, control: bool) -> Any:
    """Returns the statistics of each variable, [..., V · statistics].

    Args:
      members: [..., M, V].
      start: [..., V], or None for none.
      control: whether the first member is one.
    """
    found = [members.mean(axis=-2), members.std(axis=-2)]
    found += [members[..., 0, :]] if control else []
    found += [] if start is None else [start]
    both = np.stack(found, axis=-1)
    return both.reshape(*both.shape[:-2], -1)


class Sums(NamedTuple):
    """Sums over the dates of each group, [group, latitude, longitude, channels]."""

    total: np.ndarray
    squares: np.ndarray
    count: np.ndarray


def describe_dates(sums: Sums, cfg: "MembersConfig") -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and deviation of each point, or of what is around it.

    Around a point is a window of all longitudes' way round, that repeats the outermost
    latitudes. What groups of dates say is averaged, then smoothed by a Gaussian.
    """
    area = cfg.standardise == "area"
    total, squares, count = (_add_around(each, cfg) if area else each for each in sums)
    count = np.maximum(count, 1)
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0)).mean(0)
    mean = mean.mean(0)
    if not area:
        return mean, std
    mean, std = _smooth(mean, cfg.smoothing), _smooth(std, cfg.smoothing)
    low = int((std < _LEAST).sum())
    if low:
        log.info("%d deviations of %d are raised to %g", low, std.size, _LEAST)
    return mean, np.maximum(std, _LEAST)


def _add_around(values: np.ndarray, cfg: "MembersConfig") -> np.ndarray:
    """Returns sums over the window, [group, latitude, longitude, channels]."""
    half = cfg.window // 2
    for axis, mode in ((1, "edge"), (2, "wrap")):
        width = [(half, half) if each == axis else (0, 0) for each in range(4)]
        wide = np.pad(values, width, mode=mode)  # type: ignore[call-overload]
        views = np.lib.stride_tricks.sliding_window_view(wide, cfg.window, axis)
        values = views.sum(-1)
    return values


def _smooth(values: np.ndarray, sigma: float) -> np.ndarray:
    from scipy import ndimage

    if not sigma:
        return values
    around = ndimage.gaussian_filter1d(values, sigma, axis=1, mode="wrap")
    return ndimage.gaussian_filter1d(around, sigma, axis=0, mode="nearest")


def check_globe(fields: xr.DataArray, *, mirror: bool) -> None:
    """Raises DataFormatError for a grid that turning or mirroring does not keep."""
    latitude, longitude = (
        fields[each].to_numpy() for each in ("latitude", "longitude")
    )
    steps = np.diff(longitude, append=longitude[0] + 360)
    if not np.allclose(steps, steps[0], atol=1e-2):
        raise DataFormatError(
            "roll needs longitudes all the way round: found "
            f"{longitude[0]:g} to {longitude[-1]:g}"
        )
    if mirror and not np.allclose(latitude, -latitude[::-1], atol=1e-2):
        raise DataFormatError(
            "roll='mirror' needs latitudes alike in north and south: found "
            f"{latitude[0]:g} to {latitude[-1]:g}"
        )


def roll(channels: list[str], variables: list[str], *, mirror: bool) -> Augment:
    """Returns an augmentation that turns dates about the globe's axis.

    Places stay where they are. Half of the dates are also mirrored at the equator, with
    the other sign of v and v10.

    Args:
      channels: names of those of "fields" but for the place's.
      variables: of "members", the target first.
      mirror: whether dates are mirrored.
    """
    own = _signs([f"mean {name}" for name in variables])
    fields = _signs([*channels, *PLACE * ["place"]])
    signs = {"fields": fields, "members": own, "y": own[0]}

    def augment(batch: Batch, rng: np.random.Generator, _: Any) -> Batch:
        grid = batch["y"].shape
        turn, south = rng.random((grid[0], 4))[:, :2].T
        columns = (np.arange(grid[2]) + (turn[:, None] * grid[2]).astype(int)) % grid[2]
        flipped = (south < 0.5) & mirror
        rows = np.where(flipped[:, None], np.arange(grid[1])[::-1], np.arange(grid[1]))
        at = np.arange(grid[0])[:, None, None], rows[:, :, None], columns[:, None]

        def move(name: str, values: np.ndarray) -> np.ndarray:
            if values.shape[:3] != grid:
                return values
            moved = values[at]
            if name in signs:
                half = flipped.reshape(-1, *[1] * (values.ndim - 1))
                moved = np.where(half, moved * signs[name], moved)
            if name == "fields":
                moved[..., -PLACE:] = values[..., -PLACE:]
            return moved

        x = {name: move(name, values) for name, values in batch["x"].items()}
        rest = {name: move(name, each) for name, each in batch.items() if name != "x"}
        return {"x": x, **rest}

    return augment


def _signs(names: list[str]) -> np.ndarray:
    """Returns −1 for winds to the north, but not for their deviations."""
    turned = [_NORTHWARD.fullmatch(name) is not None for name in names]
    return np.where(turned, -1, 1).astype(np.float32)
