"""Small files of the weather in the forms in which archives deliver them."""

import h5py
import numpy as np
import xarray as xr

START = np.datetime64("2020-01-01", "ns")
LATITUDE, LONGITUDE = np.array([60.0, 20, -20, -60]), np.arange(0.0, 360, 45)
WEIGHTS = {
    **{"number": 10.0, "time": 1.0, "lead_time": 0.1, "level": 1e-3},
    **{"latitude": 1e-2, "longitude": 1e-4},
}
ATTRS = {"standard_name": "air_temperature", "units": "K"}


def value_at(axes):
    """What a field is wherever it is: a sum over the labels of its axes."""
    total = xr.DataArray(200.0)
    for name, weight in WEIGHTS.items():
        label = xr.DataArray(axes.get(name, 0.0))
        if name == "time":
            label = (label - START) / np.timedelta64(1, "D")
        elif label.dtype.kind == "m":
            label = label / np.timedelta64(1, "h")
        total = total + weight * label
    return total


def make(latitude=LATITUDE, longitude=LONGITUDE, **axes):
    """A canonical field of any axes, lists or single labels."""
    given = {"time": START, **axes, "latitude": latitude, "longitude": longitude}
    coords = {
        name: (name, np.asarray(x)) if np.ndim(x) else x for name, x in given.items()
    }
    coords = xr.Dataset(coords=coords).coords
    t = value_at(coords).transpose(*(dim for dim in WEIGHTS if np.ndim(given.get(dim))))
    return xr.Dataset({"t": t.assign_attrs(ATTRS)})


def hours(*numbers):
    return np.array(numbers, "timedelta64[h]").astype("timedelta64[ns]")


def days(count):
    return START + hours(*(24 * np.arange(count)))


def message(sample="regular_ll_pl_grib2", **keys):
    """One GRIB message of 4 by 8 points, whose values are by `value_at` of its keys."""
    import eccodes

    handle = eccodes.codes_grib_new_from_samples(sample)
    places = {
        **{"typeOfLevel": "isobaricInhPa", "level": 500, "Ni": 8, "Nj": 4},
        **{"dataDate": 20200101, "dataTime": 0},
        "latitudeOfFirstGridPointInDegrees": 60.0,
        "latitudeOfLastGridPointInDegrees": -60.0,
        "longitudeOfFirstGridPointInDegrees": 0.0,
        "longitudeOfLastGridPointInDegrees": 315.0,
        "iDirectionIncrementInDegrees": 45.0,
        "jDirectionIncrementInDegrees": 40.0,
    }
    grid = sample.startswith("regular")
    for key, value in {**(places if grid else {}), **keys, "bitsPerValue": 24}.items():
        eccodes.codes_set(handle, key, value)
    if grid:
        west = keys.get("iScansNegatively", 0)
        field = make(
            longitude=LONGITUDE[:: -1 if west else 1],
            number=keys.get("perturbationNumber", 0),
            lead_time=hours(keys.get("endStep", 0))[0],
            level=keys.get("level", 500),
        )
        eccodes.codes_set_values(handle, field["t"].to_numpy().ravel())
    content = eccodes.codes_get_message(handle)
    eccodes.codes_release(handle)
    return content


def grib(*keys):
    return lambda f: [save_bytes(f, b"".join(message(**each) for each in keys))]


def gribs(*keys):
    return lambda folder: [save_bytes(folder, message(**each)) for each in keys]


def save_bytes(folder, content):
    path = folder / f"{len(list(folder.iterdir()))}.grib"
    path.write_bytes(content)
    return path


def netcdf(*fields, **options):
    def write(folder):
        paths = []
        for at, each in enumerate(fields):
            paths.append(folder / f"{at}.nc")
            each.to_netcdf(paths[-1], **{"engine": "h5netcdf", **options})
        return paths

    return write


def write(case, folder):
    """Writes a file or several, or a netCDF of fields alone; returns the paths."""
    return (netcdf(case) if isinstance(case, xr.Dataset) else case)(folder)


def zarr(fields, spoil=None, **options):
    def write(folder):
        fields.to_zarr(folder / "a.zarr", **options)
        if spoil:
            for path in (folder / "a.zarr").glob(spoil):
                path.write_bytes(b"\x01\x02spoilt")
        return [folder / "a.zarr"]

    return write


def cut(folder):
    (path,) = write(make(), folder)
    path.write_bytes(path.read_bytes()[:2000])
    return [path]


def spoil_chunk(folder):
    path = folder / "a.nc"
    make().to_netcdf(path, engine="h5netcdf", encoding={"t": {"zlib": True}})
    with h5py.File(path) as file:
        chunk = file["t"].id.get_chunk_info(0)
    content = bytearray(path.read_bytes())
    content[chunk.byte_offset : chunk.byte_offset + chunk.size] = bytes(chunk.size)
    path.write_bytes(content)
    return [path]


def attributes(fields, **attrs):
    """Fields whose coordinates have other attributes, such as `time={"units": …}`."""
    return fields.assign_coords(
        {
            name: (fields[name].dims, fields[name].values, own)
            for name, own in attrs.items()
        }
    )


def unlabelled(fields, units):
    """Fields whose times are numbers with these units and calendar, none if empty."""
    numbers = np.arange(fields.sizes["time"], dtype=float)
    return fields.assign_coords(time=("time", numbers, units))


def as_valid(fields, *, start=True, period=True):
    """A forecast of one start as CF has it: times that are valid, start and period."""
    later, begun = fields["lead_time"].values, fields["time"].values
    valid = begun + later
    fields = fields.rename(lead_time="x").drop_vars(["time", "x"]).rename(x="time")
    fields = attributes(
        fields.assign_coords(time=valid), time={"standard_name": "time"}
    )
    if start:
        own = {"standard_name": "forecast_reference_time"}
        fields = fields.assign_coords(forecast_reference_time=((), begun, own))
    if period:
        own = {"standard_name": "forecast_period"}
        fields = fields.assign_coords(forecast_period=("time", later, own))
    return fields


def celsius(units):
    fields = make()
    fields["t"] = (fields["t"] - 273.15).assign_attrs({**ATTRS, "units": units})
    return fields


def written_out(fields, names, dims=("y", "x")):
    """Fields whose latitudes and longitudes are given for each point, as NEMO's."""
    y, x = np.meshgrid(fields["latitude"], fields["longitude"], indexing="ij")
    fields = fields.drop_vars(["latitude", "longitude"])
    fields = fields.rename(latitude=dims[0], longitude=dims[1])
    return fields.assign_coords(
        {n: (dims, v) for n, v in zip(names, (y, x), strict=True)}
    )


def and_u(fields):
    """Fields with a second variable, which is the same."""
    return fields.assign(u=fields["t"].drop_attrs())


def sampled(sample, **keys):
    """A file of a sample of another grid, as ecCodes has it."""

    def write(folder):
        import eccodes

        handle = eccodes.codes_grib_new_from_samples(sample)
        for key, value in keys.items():
            eccodes.codes_set(handle, key, value)
        return [save_bytes(folder, eccodes.codes_get_message(handle))]

    return write


LEADS = make(lead_time=hours(0, 6, 12))
WEST = {
    "longitudeOfFirstGridPointInDegrees": 315.0,
    "longitudeOfLastGridPointInDegrees": 0.0,
}
G1 = "regular_ll_pl_grib1"
LEVELS = make(level=[500.0, 850.0])
PF = {"productDefinitionTemplateNumber": 1, "numberOfForecastsInEnsemble": 3}
T = {"shortName": "t"}
PACKED = {"dtype": "i2", "_FillValue": -9, "scale_factor": 1e-3, "add_offset": 230.0}
TP = {"productDefinitionTemplateNumber": 8, "shortName": "tp"}
READ = {
    "whole": make(number=[0, 1], time=days(2), lead_time=hours(0, 6)),
    "float32 and float64": netcdf(
        attributes(make(), latitude={}, longitude={}),
        make(time=days(2)[1:]).assign_coords(
            latitude=LATITUDE.astype("f4") + np.float32(1e-5),
            longitude=LONGITUDE.astype("f4"),
        ),
    ),
    "file a lead": netcdf(*(make(lead_time=lead) for lead in hours(0, 6, 12))),
    "file a member": netcdf(
        *(make(number=each).rename(number="realization") for each in (0, 1, 2))
    ),
    "file a level": netcdf(*(make(level=each) for each in (500.0, 850.0))),
    "valid and start": as_valid(LEADS, period=False),
    "valid and period": as_valid(LEADS, start=False),
    "valid, start and period": as_valid(LEADS),
    "file a valid time": netcdf(*(as_valid(LEADS).isel(time=at) for at in range(3))),
    "starts of one period": make(time=days(3), lead_time=hours(6)[0])
    .assign_coords(time=days(3) + hours(6))
    .rename(lead_time="forecast_period")
    .assign_coords(forecast_period=("time", hours(6, 6, 6))),
    "two dimensions of time": make(time=days(2), lead_time=hours(0, 6))
    .rename(time="forecast_reference_time", lead_time="forecast_period")
    .assign_coords(
        time=(
            ("forecast_reference_time", "forecast_period"),
            days(2)[:, None] + hours(0, 6),
        )
    ),
    "standard names": attributes(
        LEVELS.rename(latitude="a", longitude="b", level="c"),
        a={"standard_name": "latitude", "units": "degrees"},
        b={"units": "degrees_east"},
        c={"standard_name": "air_pressure", "units": "hPa"},
    ),
    "lev": attributes(LEVELS.rename(level="lev"), lev={"units": "millibar"}),
    "isobaric": attributes(
        LEVELS.assign_coords(level=[50_000.0, 85_000.0]).rename(level="isobaric"),
        isobaric={"units": "Pa", "axis": "Z"},
    ),
    "levels of pascals": LEVELS.assign_coords(level=[50_000.0, 85_000.0]),
    "capitals": make().rename(latitude="LAT", longitude="LON"),
    "start of its own": as_valid(LEADS, start=False, period=False).assign(
        reftime=((), START, {"standard_name": "forecast_reference_time"})
    ),
    "one standard name": make().assign(T_2M=make()["t"]).rename(t="T"),
    "axis T": attributes(
        make(time=days(2)).rename(time="record"), record={"axis": "T"}
    ),
    "nav_lat": written_out(make(), ("nav_lat", "nav_lon")),
    "bounds": make(time=days(2)).assign(
        lat_bnds=(("latitude", "bnds"), np.zeros((4, 2))), crs=((), 0)
    ),
    **{
        f"in {units}": celsius(units)
        for units in ("°C", "degC", "degrees_C", "Celsius", "degree_Celsius")
    },
    "0 and 360": make(longitude=np.arange(0.0, 361, 45)),
    "-180 and 180": make(longitude=np.arange(-180.0, 181, 45) % 360).assign_coords(
        longitude=np.arange(-180.0, 181, 45)
    ),
    "one column": make(longitude=[359.75]),
    "cells of 0.02": make(longitude=np.array([359.96, 359.98, 0])),
    "file a latitude": netcdf(*(make(latitude=[each]) for each in LATITUDE)),
    "history of lists": make().assign_attrs(history=["a", "b"]),
    "leads in h": LEADS.assign_coords(
        lead_time=("lead_time", [0, 6, 12], {"units": "h"})
    ),
    "leads in parts of days": make(lead_time=hours(0, 1, 2)).assign_coords(
        lead_time=("lead_time", np.float32([0, 1 / 24, 1 / 12]), {"units": "days"})
    ),
    "ensemble_member": make(number=[0, 1]).rename(number="ensemble_member"),
    "south to north": make(latitude=LATITUDE[::-1]),
    "western": make(longitude=np.roll(LONGITUDE, 4)).assign_coords(
        longitude=np.arange(-180.0, 180, 45)
    ),
    "radians": attributes(
        make().assign_coords(
            latitude=np.deg2rad(LATITUDE), longitude=np.deg2rad(LONGITUDE)
        ),
        latitude={"units": "radians"},
        longitude={"units": "radian"},
    ),
    "strip": make(latitude=np.arange(1.5, -1.6, -0.25)),
    "order": make(time=days(2)).transpose("longitude", "time", "latitude"),
    "packed": netcdf(make(), encoding={"t": PACKED}),
    "netCDF 3": netcdf(make(time=days(2)), engine="scipy", format="NETCDF3_64BIT"),
    "group": netcdf(make(), group="a"),
    "zarr 2": zarr(make(time=days(2)), zarr_format=2, consolidated=True),
    "zarr 3": zarr(make(time=days(2)), zarr_format=3, consolidated=False),
    "zarr group": zarr(make(), group="a", consolidated=False),
    "days since": unlabelled(make(time=days(2)), {"units": "days since 2020-01-01"}),
    "GRIB 2": grib(*({**T, "level": each} for each in (850, 500))),
    "GRIB 1 to -45": grib(
        {"sample": G1, "shortName": "t", "longitudeOfLastGridPointInDegrees": -45.0}
    ),
    "GRIB from the east": grib({**T, "iScansNegatively": 1, **WEST}),
    "GRIB without increments": grib({**T, "ijDirectionIncrementGiven": 0}),
    "GRIB a lead": gribs(*({**T, "endStep": x} for x in (0, 6, 12))),
    "GRIB a member": gribs(*(dict(**PF, **T, perturbationNumber=x) for x in (1, 2))),
    "GRIB of control and members": grib(
        dict(**PF, **T, typeOfProcessedData=3, perturbationNumber=0),
        *(dict(**PF, **T, typeOfProcessedData=4, perturbationNumber=x) for x in (1, 2)),
    ),
}
# How many there are of what files are joined along, or of what is there twice.
SIZES = {
    **dict.fromkeys(
        ("file a lead", "file a valid time", "GRIB a lead"), ("lead_time", 3)
    ),
    **dict.fromkeys(("file a member", "GRIB of control and members"), ("number", 3)),
    **dict.fromkeys(("0 and 360", "-180 and 180"), ("longitude", 8)),
    **{"file a level": ("level", 2), "float32 and float64": ("time", 2)},
}
