"""Small files of the weather that cannot be read as they are, and what is said."""

import numpy as np

from tests.data.weather_files import (
    G1,
    LATITUDE,
    LEADS,
    LEVELS,
    LONGITUDE,
    START,
    TP,
    WEST,
    T,
    as_valid,
    attributes,
    celsius,
    cut,
    days,
    grib,
    hours,
    make,
    netcdf,
    sampled,
    spoil_chunk,
    unlabelled,
    written_out,
    zarr,
)


def changed(**coords):
    return make(time=days(3)).assign_coords(coords)


def contradicting():
    """Valid times that are an hour later than starts and lead times say."""
    fields = make(time=days(3), lead_time=hours(0, 6))
    later = fields["time"] + fields["lead_time"] + np.timedelta64(1, "h")
    start = fields["time"].assign_attrs(standard_name="forecast_reference_time")
    return fields.assign_coords(
        time=start, valid_time=later.assign_attrs(standard_name="time")
    )


REFUSED = {
    "valid times of others": ("valid_time is not time and lead_time", contradicting()),
    "before its start": (
        "is before its start",
        make(time=days(3), lead_time=hours(-6, 0)),
    ),
    "radians without unit": ("are radians", changed(latitude=np.deg2rad(LATITUDE))),
    "beyond the pole": (
        "from -90 to 90 degrees, found -170",
        changed(latitude=[60.0, 20, -20, -170]),
    ),
    "metres": (
        "expected latitude in degrees, found m",
        attributes(make(), latitude={"units": "m"}),
    ),
    "twice": (
        r"there twice.*drop_duplicates",
        changed(longitude=[0.0, 45, 45, 90, 135, 180, 225, 270]),
    ),
    "no unit of time": (
        "expected times with a unit",
        unlabelled(make(time=days(3)), {}),
    ),
    "months": (
        "'months since 2020-01-01', and these are of no one length",
        unlabelled(make(time=days(3)), {"units": "months since 2020-01-01"}),
    ),
    "no unit of leads": (
        "expected lead times with a unit",
        LEADS.assign_coords(lead_time=[0, 6, 12]),
    ),
    "any times": (
        "a lead time for each of time",
        make(time=days(3)).assign_coords(forecast_period=("time", hours(0, 6, 6))),
    ),
    "valid time of others": (
        "time is not forecast_reference_time and forecast_period",
        as_valid(LEADS).assign_coords(forecast_period=("time", hours(0, 6, 18))),
    ),
    "curvilinear": (
        "nav_lat is of y, x: expected a grid",
        written_out(make(), ("nav_lat", "nav_lon")).assign_coords(
            nav_lat=(("y", "x"), LATITUDE[:, None] + LONGITUDE / 100)
        ),
    ),
    "rotated": (
        "a dimension latitude and one longitude, found rlat, rlon",
        attributes(
            make().rename(latitude="rlat", longitude="rlon"),
            rlat={"standard_name": "grid_latitude", "units": "degrees"},
        ),
    ),
    "stations": (
        "places of each cell: expected a grid",
        make(longitude=0.0)
        .rename(latitude="cell", longitude="at")
        .drop_vars(["cell", "at"])
        .assign_coords(lat=("cell", LATITUDE), lon=("cell", LATITUDE)),
    ),
    "model levels": (
        "expected levels of pressure, found atmosphere_hybrid",
        attributes(LEVELS, level={"standard_name": "atmosphere_hybrid_height"}),
    ),
    "levels of a model": (
        "expected levels of pressure, found model_level_number",
        attributes(LEVELS, level={"long_name": "model_level_number"}),
    ),
    "hybrid levels in hPa": (
        "expected levels of pressure, found atmosphere_hybrid_sigma",
        attributes(
            LEVELS,
            level={
                "standard_name": "atmosphere_hybrid_sigma_pressure_coordinate",
                "units": "hPa",
            },
        ),
    ),
    "no latitude": ("no latitude is selected", make().isel(latitude=[])),
    "names of latitudes": (
        "expected latitude in numbers",
        make().assign_coords(latitude=["60N", "20N", "20S", "60S"]),
    ),
    "months of lead": (
        r"expected lead times with a unit.*\[0, 1, 2\] months",
        LEADS.assign_coords(lead_time=("lead_time", [0, 1, 2], {"units": "months"})),
    ),
    "no variable": ("no variable of latitudes", make().drop_vars("t")),
    "a level for each time": (
        "level is of time: expected level as a dimension of its own",
        changed(level=("time", [500.0, 700, 850])),
    ),
    "a level for each longitude": (
        "level is of longitude: expected level as a dimension of its own",
        make().assign_coords(level=("longitude", LONGITUDE + 500)),
    ),
    "two levels": (
        "isobaric and level are both level|level and isobaric are both level",
        LEVELS.assign(u=LEVELS["t"].rename(level="isobaric").drop_attrs()).pipe(
            attributes, isobaric={"units": "hPa"}
        ),
    ),
    "unit": ("expected t in K, found 'm s-1'", celsius("m s-1")),
    "no such unit": ("expected t in K, found 'warm'", celsius("warm")),
    "other places": (
        "do not fit together",
        netcdf(make(), make(time=days(2)[1]).assign_coords(latitude=LATITUDE + 0.1)),
    ),
    "other units": (
        "do not fit together: x is in K and in C",
        netcdf(
            *(
                make(time=day).assign(
                    x=lambda d, units=units: (
                        d["t"].drop_attrs().assign_attrs(units=units)
                    )
                )
                for day, units in zip(days(2), "KC", strict=True)
            )
        ),
    ),
    "the same twice": ("do not fit together", netcdf(make(), make())),
    "cut netCDF": ("damaged netCDF", cut),
    "other heights": (
        "do not fit together: t is in K on levels and in K at 80 m|at 80 m and in K on",
        grib(T, {**T, "typeOfLevel": "heightAboveGround", "level": 80}),
    ),
    "netCDF chunk": (": t is damaged", spoil_chunk),
    "level twice": ("level 500.0 is there twice", make(level=[500.0, 500.0])),
    "member twice": ("number 1 is there twice", make(number=[1, 1])),
    "no date": (
        "time is missing in some places",
        make(time=np.array([START, "NaT"], "datetime64[ns]")),
    ),
    "no netCDF group": ("no group 'a'", make()),
    "netCDF 3 group": (
        "netCDF 3 has no groups",
        netcdf(make(), engine="scipy", format="NETCDF3_64BIT"),
    ),
    "no zarr group": ("no group 'a'", zarr(make(), consolidated=False)),
    "zarr metadata": ("damaged zarr", zarr(make(), "t/zarr.json", consolidated=False)),
    "zarr axis": ("damaged zarr", zarr(make(), "latitude/c/*", consolidated=False)),
    "zarr chunk": (": t is damaged", zarr(make(), "t/c/*/*", consolidated=False)),
    "GRIB of analysis and forecast": (
        "whose variables are t, u: .*'lead_time'",
        grib(T, {"shortName": "u", "endStep": 6}),
    ),
    "GRIB of levels": (
        "whose variables are t, u: .*'level'",
        grib(T, {"shortName": "u", "level": 850}),
    ),
    "GRIB 1 to -1": (
        "go from 0 to -1 in steps of 51.2857, and the file says steps of 45",
        grib({"sample": G1, "longitudeOfLastGridPointInDegrees": -1.0}),
    ),
    "GRIB along meridians": (
        "stored along meridians",
        grib({"jPointsAreConsecutive": 1}),
    ),
    "GRIB scanned in two ways": (
        "points of t are at other places, or in another order",
        grib({**T, "level": 850}, {**T, "iScansNegatively": 1, **WEST}),
    ),
    "GRIB of a rotated pole": (
        "the grid of t has a pole of its own",
        sampled("rotated_gg_pl_grib2", latitudeOfSouthernPoleInDegrees=-40.0),
    ),
    "reduced GRIB": (
        "places of each values: expected a grid",
        grib({"sample": "reduced_gg_pl_32_grib2"}),
    ),
    "accumulations": (
        "2 messages of tp, .*over 0-6 and 5-6 hours: keep one",
        grib(*({**TP, "startStep": x, "endStep": 6} for x in (0, 5))),
    ),
}
