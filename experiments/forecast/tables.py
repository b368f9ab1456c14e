"""The table of the scores themselves."""

from typing import TYPE_CHECKING

from hpcjax.runs import reduce
from hpcjax.runs.pictures import Dots
from hpcjax.runs.reduce import Cells, cell
from hpcjax.runs.tables import Runs, Table, on_cpu

if TYPE_CHECKING:
    import xarray as xr

_SCORES = {
    "CRPS, Gaussian": {"score": "gaussian"},
    "CRPS, censored Gaussian": {"score": "censored"},
    "CRPS, fair, 5 members": {"score": "fair", "members": "5"},
    "CRPS, fair, 10 members": {"score": "fair"},
    "CRPS, unfair, 10 members": {"score": "unfair"},
    "CRPS, fair, 50 members": {"score": "fair", "members": "50"},
    "RMSE": {"score": "rmse"},
    "spread, 10 members": {"score": "spread"},
}
_CENSORED = "CRPS, censored Gaussian"
_TEXTBOOK = "spread, in one pass"


@reduce.by_row
def scores(run: "xr.Dataset") -> Cells:
    """Returns a score's distance and ratio."""
    only = reduce.first(run)
    return {name: only[name] for name in ("distance", "ratio", "ratio_high")}


SCORES = Table(
    id="forecast/scores",
    title="Scores far from zero: distance from float64, seconds over a peer's",
    paper="forecast verification; peers are properscoring, scoringrules and scores",
    caption=(
        "A million points near 54,000 m²/s², as geopotential at 500 hPa, with a spread "
        "of 13; float32, against the definition in float64 of the same numbers: the "
        "largest relative distance of any point. Ratio: to the fastest of the peers, "
        "which compute in float64, on the same cores, median of 20 rounds, and the "
        "upper end of its 95 % interval. in one pass: the mean of squares less the "
        "square of the mean."
    ),
    shows=(
        "Scores of forecasts were computed in float32 and timed beside other "
        "libraries. Left of the line is faster than the fastest peer; on the right, "
        "how far from exact."
    ),
    picture=Dots(("ratio", "distance"), bound="fast"),
    columns={
        "distance": "largest relative distance",
        "ratio": "seconds over the fastest peer's",
        "ratio_high": "at most",
    },
    reduce=scores,
    benchmark=True,
    tiers=on_cpu(
        minutes=3.0,
        runs={
            **{
                row: Runs(config="forecast/scores", overrides=overrides)
                for row, overrides in _SCORES.items()
            },
            _TEXTBOOK: Runs(config="forecast/scores:one_pass"),
        },
        claims={
            "exact": reduce.most("distance", *(set(_SCORES) - {_CENSORED}))
            .at_most(1e-6, "largest relative distance of all scores but the censored")
            .fails({"spread, 10 members": _TEXTBOOK}),
            "censored": cell("distance", _CENSORED)
            .at_most(1e-4, "the censored score's, of which float32 cancels a part")
            .fails({_CENSORED: _TEXTBOOK}),
            "fast": reduce.most("ratio_high", *_SCORES)
            .at_most(1.0, "seconds over the fastest peer's, at the most")
            .fails({"spread, 10 members": _TEXTBOOK}),
        },
    ),
)
