"""What a run has learnt of forecasts, of dates that it has not seen."""

import numpy as np
import pytest
import xarray as xr
from scipy import stats

from hpcjax import data, runs
from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.data import lorenz96

SIZES = (16, 4, 4)
SMALL = {"dataset.train": "16", "dataset.validation": "4", "dataset.fold_dates": "4"}


def dates_of(part):
    """The forecasts of a part of the circle's dates, and their truth."""
    forecast, truth = lorenz96.simulate(SIZES, 2, 20, 0, contrast=2.0, share=0.005)
    at = (forecast["part"] == part).to_numpy()
    return forecast.isel(time=at), truth.isel(time=at)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A few steps of EMOS."""
    root = tmp_path_factory.mktemp("trained")
    given = SMALL | {"train.steps": "3", "train.eval_every": "3"}
    given |= {"train.batch_size": "4", "dataset.members": "3"}
    result = runs.run("ens_postprocess/circle:emos", given, root=root, quiet=True)
    return runs.load_trained(result.id, root=root), result


def test_a_prediction_is_what_validation_has_scored(ran):
    trained, result = ran
    forecast, truth = dates_of(2)
    found = trained.predict(forecast, truth)
    assert found["mean"].dims == ("time", "latitude", "longitude")
    y = truth["x"].isel(lead_time=2).to_numpy()
    mean, std = found["mean"].to_numpy(), found["std"].to_numpy()
    z = (y - mean) / std
    crps = std * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z))
    crps -= std / np.sqrt(np.pi)
    told = float(result.dataset["val_crps"].isel(eval_step=-1))
    assert crps.mean() == pytest.approx(told, rel=1e-5)
    # Later dates, members beyond the third and further leads change nothing.
    some = forecast.isel(time=[2, 0][::-1], number=slice(3))
    again = trained.predict(some.transpose("longitude", ...), truth)
    np.testing.assert_allclose(again["mean"], mean[[0, 2]], rtol=1e-6)
    gap = forecast.copy(deep=True)
    gap["x"][0, 1, 2, 0, 5] = np.nan
    lost = trained.predict(gap, truth)["std"].to_numpy()
    assert np.isnan(lost).sum() == 1
    assert np.isnan(lost[1, 0, 5])


def test_a_prediction_says_what_it_is(ran):
    trained, _ = ran
    forecast, truth = dates_of(2)
    found = trained.predict(forecast, truth)
    assert found.attrs["Conventions"].startswith("CF-")
    assert trained.id in found.attrs["source"]
    assert found["std"].attrs["cell_methods"] == "realization: standard_deviation"
    assert found["latitude"].attrs["units"] == "degrees_north"
    assert found["lead_time"] == np.timedelta64(48, "h")
    known = found.assign({n: found[n].assign_attrs(short_name="t") for n in found})
    there = data.to_weatherbench(known)
    assert set(there) == {"temperature", "temperature_std"}
    assert there["temperature"].dims[-2:] == ("longitude", "latitude")


def test_forecasts_of_another_kind_are_refused(ran):
    trained, _ = ran
    forecast, truth = dates_of(2)
    predict = trained.predict

    def spoil(**change):
        return forecast.assign_coords({n: forecast[n] + by for n, by in change.items()})

    for given, message in (
        (spoil(longitude=1.0), "longitude differs"),
        (forecast.isel(number=slice(2)), "expected 3 members of x, found 2"),
        (forecast.isel(lead_time=slice(2)), "lead times"),
        (forecast.rename(x="z"), "no target 'x'"),
        (forecast.isel(number=0), "dimensions number and time"),
        (forecast.assign(x=forecast["x"].assign_attrs(units="K")), "is in K"),
    ):
        with pytest.raises(DataFormatError, match=message):
            predict(given, truth)
    with pytest.raises(DataFormatError, match="analysis: the truth"):
        predict(forecast)


def test_runs_of_something_else_are_refused(ran, tmp_path):
    with pytest.raises(ConfigError, match="no run 'none'"):
        runs.load_trained("none", root=tmp_path)
    given = {"train.steps": "1", "train.eval_every": "1"}
    other = runs.run("train/digits", given, root=tmp_path, quiet=True)
    with pytest.raises(ConfigError, match="forecasts with members"):
        runs.load_trained(other.id, root=tmp_path)
    (other.directory / "status").write_text("running")
    with pytest.raises(ConfigError, match="must have finished"):
        runs.load_trained(other.id, root=tmp_path)


@pytest.mark.slow
def test_no_optimizer_moves_the_mean_of_a_fork(tmp_path):
    """By weight decay, and by the momentum of the run before."""
    given = SMALL | {"dataset.folds": "2", "train.batch_size": "8"}
    given |= {"train.steps": "3", "model.mean.filters": "2", "model.spread.base": "2"}
    first = runs.run("ens_postprocess/circle:staged", given, root=tmp_path, quiet=True)
    given |= {"train.steps": "6", "optimizer.weight_decay": "0.5"}
    then = runs.run(
        "ens_postprocess/circle:joint",
        given,
        root=tmp_path,
        resume=first.id,
        fork=True,
        quiet=True,
    )
    forecast, truth = dates_of(2)
    one, other = (
        runs.load_trained(each.id, root=tmp_path).predict(forecast, truth)
        for each in (first, then)
    )
    xr.testing.assert_identical(one["mean"], other["mean"])
    assert not np.allclose(one["std"], other["std"])
