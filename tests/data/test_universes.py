"""Universes have the spectrum that they were drawn with, and all of their particles."""

import dataclasses

import numpy as np
import pytest
from scipy import integrate

from hpcjax import data
from hpcjax.core import ConfigError
from hpcjax.data import universes

OWN = universes.Cosmology(0.3, 0.8, 0.96, 0.7)
WIDTH, CELL = 16, 8.0
SMALL = data.UniversesConfig(count=6, width=8, boxes=2)


def bbks(k):
    q = k / (0.3 * 0.7)
    rest = 1 + 3.89 * q + (16.1 * q) ** 2 + (5.46 * q) ** 3 + (6.71 * q) ** 4
    return k**0.96 * (np.log(1 + 2.34 * q) / (2.34 * q)) ** 2 / np.sqrt(rest)


def test_the_field_has_the_spectrum_of_the_formula():
    def variance(k):
        x = 8 * k
        return k**2 * bbks(k) * (3 * (np.sin(x) - x * np.cos(x)) / x**3) ** 2

    total = integrate.quad(variance, 1e-5, 20, limit=2000)[0] / (2 * np.pi**2)
    rng, size = np.random.default_rng(0), WIDTH * CELL
    found = np.zeros((WIDTH,) * 3)
    for _ in range(200):
        field = universes.linear_field(OWN, WIDTH, CELL, rng)
        found += np.abs(np.fft.fftn(field)) ** 2 * size**3 / WIDTH**6 / 200
    whole = 2 * np.pi * np.fft.fftfreq(WIDTH, CELL)
    k = np.sqrt(sum(each**2 for each in np.meshgrid(whole, whole, whole)))
    shell = np.round(k * size / (2 * np.pi))
    for number in range(1, WIDTH // 2 + 1):
        at = shell == number
        wanted = np.mean(bbks(k[at])) * 0.8**2 / total
        assert np.mean(found[at]) == pytest.approx(wanted, rel=0.05), number
    assert found[0, 0, 0] == pytest.approx(0)


def test_displacements_take_away_what_the_field_has_and_mass_is_kept():
    field = universes.linear_field(OWN, WIDTH, CELL, np.random.default_rng(1))
    shifts = universes.displacements(field, CELL)
    waves = 2 * np.pi * np.fft.fftfreq(WIDTH, CELL)
    waves[WIDTH // 2] = 0  # of which a real field has no slope
    spread = sum(
        np.fft.ifftn(1j * wave * np.fft.fftn(shift)).real
        for wave, shift in zip(
            np.meshgrid(waves, waves, waves, indexing="ij"), shifts, strict=True
        )
    )
    modes = np.fft.fftn(field)
    modes[WIDTH // 2], modes[:, WIDTH // 2], modes[:, :, WIDTH // 2] = 0, 0, 0
    inside = np.fft.fftn(-spread)
    inside[WIDTH // 2], inside[:, WIDTH // 2], inside[:, :, WIDTH // 2] = 0, 0, 0
    np.testing.assert_allclose(inside, modes, atol=1e-9 * np.abs(modes).max())
    counts = universes.count_cells(shifts / CELL)
    assert counts.sum() == WIDTH**3
    assert counts.min() >= 0


@pytest.mark.parametrize("width", [7, 8])
def test_a_turned_field_has_turned_displacements(width):
    field = universes.linear_field(OWN, width, CELL, np.random.default_rng(1))
    shifts = universes.displacements(field, CELL)
    turned = universes.displacements(field.transpose(2, 0, 1), CELL)
    wanted = shifts.transpose(0, 3, 1, 2)[[2, 0, 1]]
    np.testing.assert_allclose(turned, wanted, atol=1e-12 * np.abs(shifts).max())


def test_a_particle_is_shared_by_the_cells_that_it_covers():
    shifts = np.zeros((3, 4, 4, 4))
    assert np.array_equal(universes.count_cells(shifts), np.ones((4, 4, 4)))
    shifts[0, 3, 0, 0] = 0.25  # past the end, to the first cell
    counts = universes.count_cells(shifts)
    assert (counts[3, 0, 0], counts[0, 0, 0]) == (0.75, 1.25)


@pytest.mark.parametrize(("matter", "redshift"), [(0.3, 1.0), (0.15, 3.0), (0.5, 0.5)])
def test_growth_is_that_of_the_integral(matter, redshift):
    def rate(a):
        return np.sqrt(matter / a**3 + 1 - matter)

    def grown(a):
        found = integrate.quad(lambda s: (s * rate(s)) ** -3, 1e-6, a)[0]
        return rate(a) * found

    wanted = grown(1 / (1 + redshift)) / grown(1.0)
    assert universes.growth(matter, redshift) == pytest.approx(wanted, rel=0.02)


def test_a_universe_is_the_same_for_every_count_and_on_one_side():
    few, many = SMALL.load(), dataclasses.replace(SMALL, count=9).load()
    parts = [
        {tuple(row): None for row in part.gather(np.arange(len(part)))["y"].tolist()}
        for own in (few, many)
        for part in own[:2]
    ]
    assert {*parts[0], *parts[1]} <= {*parts[2], *parts[3]}
    assert not {*parts[0]} & {*parts[1]}
    assert len(few.train) + len(few.validation) == 6 * 8
    whole = dataclasses.replace(SMALL, boxes=1).load().train.gather(np.arange(1))
    first = few.train.gather(np.arange(8))
    assert np.array_equal(first["x"][0], whole["x"][0, :4, :4, :4])
    assert np.array_equal(first["x"][1], whole["x"][0, :4, :4, 4:])
    assert np.all(first["y"] == whole["y"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"boxes": 3}, "boxes must divide the width: got boxes=3, width=16"),
        ({"redshifts": ()}, "redshifts must be at least one"),
        ({"redshifts": (-0.5,)}, "redshifts must be .* none below 0"),
        ({"count": 1}, "count must be an integer >= 2"),
    ],
)
def test_wrong_fields_are_told(fields, message):
    with pytest.raises(ConfigError, match=message):
        data.UniversesConfig(**fields)
