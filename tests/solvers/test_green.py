"""Green's functions against dense inverses, bands, and what is known of chains."""

import dataclasses
import tracemalloc
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from hpcjax import solvers
from hpcjax.core import ConfigError
from hpcjax.core.errors import DataFormatError

B, N, BATCH = 6, 3, 2


def draw(rng, *shape):
    return rng.normal(size=shape) + 1j * rng.normal(size=shape)


def dense(diagonal, upper, lower):
    """[..., B n, B n] of [B, ..., n, n]."""
    whole = np.zeros((BATCH, B, N, B, N), complex)
    for i in range(B):
        whole[:, i, :, i] = diagonal[i]
    for i in range(B - 1):
        whole[:, i, :, i + 1], whole[:, i + 1, :, i] = upper[i], lower[i]
    return whole.reshape(BATCH, B * N, B * N)


def star(x):
    return x.conj().swapaxes(-1, -2)


@pytest.fixture(scope="module")
def system():
    rng = np.random.default_rng(0)
    a = draw(rng, B, BATCH, N, N) + 4 * np.eye(N)
    upper, lower = draw(rng, 2, B - 1, BATCH, N, N)
    skew = draw(rng, 2, B, BATCH, N, N)
    sigma, beside = skew - star(skew), draw(rng, 2, B - 1, BATCH, N, N)
    return a, upper, lower, sigma, beside


@pytest.mark.acceptance("omen", 3)
@pytest.mark.parametrize("off_diagonal", [True, False])
def test_blocks_are_those_of_the_dense_inverse(system, off_diagonal):
    a, upper, lower, sigma, beside = system
    beside = beside * off_diagonal
    found = jax.jit(solvers.rgf)(a, upper, lower, *sigma, off_diagonal=tuple(beside))
    g = np.linalg.inv(dense(a, upper, lower))
    cut = g.reshape(BATCH, B, N, B, N)
    for i in range(B):
        np.testing.assert_allclose(found.retarded[i], cut[:, i, :, i], atol=1e-10)
    for i in range(B - 1):
        above, below = cut[:, i, :, i + 1], cut[:, i + 1, :, i]
        np.testing.assert_allclose(found.retarded_upper[i], above, atol=1e-10)
        np.testing.assert_allclose(found.retarded_lower[i], below, atol=1e-10)
    for both in (0, 1):
        skew = dense(sigma[both], beside[both], -star(beside[both]))
        want = (g @ skew @ star(g)).reshape(BATCH, B, N, B, N)
        for i in range(B):
            ours = found.correlation[i, both]
            np.testing.assert_allclose(ours, want[:, i, :, i], atol=1e-10)
        for i in range(B - 1):
            ours = found.correlation_upper[i, both]
            np.testing.assert_allclose(ours, want[:, i, :, i + 1], atol=1e-10)


def test_what_is_not_skew_is_refused(system):
    a, upper, lower, sigma, _ = system
    with pytest.raises(ConfigError, match="greater must be skew"):
        solvers.rgf(a, upper, lower, sigma[0], 1j * sigma[1])


def test_a_surface_is_that_of_its_equation():
    rng = np.random.default_rng(1)
    h00, h01 = draw(rng, 2, N, N)
    h00 = h00 + star(h00)
    z = np.linspace(-1, 1, 5) + 1e-4j
    find = jax.jit(solvers.surface_gf)
    surface = find(z, h00, h01, limit=100)
    g = surface.value
    again = np.linalg.inv(z[:, None, None] * np.eye(N) - h00 - h01 @ g @ star(h01))
    np.testing.assert_allclose(g, again, atol=1e-9)
    assert surface.converged.all()
    assert surface.residual.max() < 1e-9
    # A few steps are too few, and it says so.
    early = find(z, h00, h01, limit=3)
    assert not early.converged.any()
    assert early.residual.max() > 1e-3


transmission = jax.jit(solvers.transmission, static_argnames="kind")


@pytest.mark.acceptance("omen", 1)
def test_a_chain_lets_all_through_inside_its_band():
    energies = np.concatenate([np.linspace(-1.96, 1.96, 50), [-2.5, -2.1, 2.1, 2.5]])
    found = transmission(solvers.chain().electrons, energies)[0]
    np.testing.assert_allclose(found[:50], 1, atol=1e-4)
    np.testing.assert_allclose(found[50:], 0, atol=1e-4)


@pytest.mark.acceptance("omen", 1)
@pytest.mark.parametrize("edge", ["zigzag", "armchair"])
def test_a_ribbon_has_a_channel_for_each_band(edge):
    slabs = solvers.ribbon(3, 4, edge).electrons
    energies = np.linspace(-9, 9, 60)
    phase = np.exp(1j * np.linspace(-np.pi, np.pi, 2001))[:, None, None]
    hop = slabs.coupling[0, 0]
    bands = np.linalg.eigvalsh(slabs.onsite[0, 0] + hop * phase + star(hop) / phase)
    below = bands[:, :, None] < energies
    crossings = (below[1:] != below[:-1]).sum((0, 1)) / 2
    assert crossings.min() == 0
    assert crossings.max() > 1
    found = np.asarray(transmission(slabs, energies)[0])
    np.testing.assert_allclose(found, crossings, atol=1e-4)


@pytest.mark.acceptance("omen", 1)
def test_where_the_bands_of_a_zigzag_ribbon_meet_its_transmission_is_a_number():
    """At E = t, a level of its dimers, where cells halved one by one lose all digits.

    A parabolic band begins there. For modes exp(i κ n), κ² = i η, Γ_L G^R
    Γ_R G^A = (2 Re κ / 2 |κ|)² = cos² 45°: it has a half of what is above.
    """
    slabs = solvers.ribbon(3, 4).electrons
    found = transmission(slabs, np.array([2.5, 2.7, 2.9, -2.7]))
    np.testing.assert_allclose(found[0], [3, 3.5, 4, 3.5], atol=1e-3)


def test_a_surface_that_decimation_alone_does_not_find():
    slabs = solvers.ribbon(3, 4).electrons
    h00, h01 = slabs.right.onsite[0], slabs.right.coupling[0]
    z = np.array([2.69, 2.7, -2.7]) + 1e-6j
    surface = jax.jit(solvers.surface_gf)(z, h00, h01)
    assert surface.converged.all()
    g = np.asarray(surface.value)
    rest = (z[:, None, None] * np.eye(8) - h00 - h01 @ g @ star(h01)) @ g - np.eye(8)
    assert np.abs(rest).max() < 1e-6
    assert np.linalg.eigvalsh(1j * (g - star(g))).min() > -1e-6  # the retarded one


def test_a_lead_whose_surface_is_wrong_is_told():
    """With an imaginary part that rounding swallows."""
    slabs = solvers.ribbon(3, 4).electrons
    options = {"temperature": 1.0, "grid": solvers.make_grid(2.5, 0.2, 3, 1)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of levels outside of so small a grid
        found = [
            solvers.ballistic(solvers.ribbon(3, 4), 0.0, eta=eta, **options).converged
            for eta in (1e-6, 1e-16)
        ]
    assert found == [True, False]
    assert np.isnan(
        transmission(slabs, np.array([2.5, 2.7, 2.9, -2.7]), eta=1e-16)[0, 1]
    )


def test_leads_may_have_other_cells():
    slabs = solvers.chain().electrons
    two = solvers.Lead(
        onsite=np.array([[[0, -1], [-1, 0]]]),
        coupling=np.array([[[0, 0], [-1, 0]]]),
        contact=np.array([[[-1, 0]]]),
    )
    found = transmission(dataclasses.replace(slabs, left=two), np.array([0.5, 2.5]))
    np.testing.assert_allclose(found[0], [1, 0], atol=1e-4)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"eta": 0.0}, "eta must be finite and > 0"),
        ({"kind": "electrns"}, "kind must be one of|kind"),
        ({"energies": np.array([np.nan])}, "energies must be .* finite"),
        ({"energies": np.array([0.5 + 1j])}, "energies must be a vector of real"),
        ({"energies": np.zeros((2, 2))}, "energies must be a vector of real"),
        ({"energies": np.zeros(0)}, "energies must be a vector of real"),
        ({"slabs": "left.contact"}, r"slabs.left.contact must be \(1, 1, 1\)"),
        ({"slabs": "right.onsite"}, "slabs.right.onsite must be"),
    ],
)
def test_transmissions_that_cannot_be(given, match):
    slabs = solvers.chain().electrons
    if "slabs" in given:
        given = {"slabs": changed(slabs, given["slabs"], np.ones((1, 1, 2)))}
    given = {"slabs": slabs, "energies": np.zeros(1)} | given
    with pytest.raises((ConfigError, TypeCheckError), match=match):
        solvers.transmission(**given)


def test_transmission_needs_double_precision():
    with jax.enable_x64(False), pytest.raises(ConfigError, match="needs float64"):
        solvers.transmission(solvers.chain().electrons, np.zeros(1))


def test_phonons_of_a_chain_pass_below_its_largest_frequency():
    found = transmission(
        solvers.chain(spring=0.09).phonons, np.array([0.1, 0.5, 0.7]), kind="phonons"
    )
    np.testing.assert_allclose(found[0], [1, 1, 0], atol=1e-4)


HR = """written by hand
1
3
 2 1 2
-1 0 0 1 1 -2.0 0.0
 0 0 0 1 1  0.5 0.0
 1 0 0 1 1 -2.0 0.0
"""


TWO_ORBITALS = """written by hand
2
1
 1
 0 0 0 1 1 1.0 0
 0 0 0 2 1 0.1 0
 0 0 0 1 2 0.1 0
 0 0 0 2 2 2.0 0
"""


def test_a_file_of_wannier90(tmp_path):
    path = tmp_path / "x_hr.dat"
    path.write_text(HR)  # a chain of hopping -1 around 0.5, its ends counted twice
    found = transmission(solvers.read_hr(path), np.array([-1.6, -1.4, 2.4, 2.6]))
    np.testing.assert_allclose(found[0], [0, 1, 1, 0], atol=1e-4)


def test_a_file_with_longer_hopping_and_momenta(tmp_path):
    """Bands of the slabs, of two cells, are those of the cells, folded."""
    rng = np.random.default_rng(0)
    cells = [(r, s, 0) for r in range(-2, 3) for s in (-1, 0, 1)]
    terms = {cell: draw(rng, 2, 2) for cell in cells}
    terms = {c: (h + star(terms[-c[0], -c[1], 0])) / 2 for c, h in terms.items()}
    lines = ["made", "2", str(len(cells)), "1 " * len(cells)]
    for cell in cells:
        for n, m in np.ndindex(2, 2):
            h = terms[cell][m, n]
            words = (*cell, m + 1, n + 1, f"{h.real:.9f}", f"{h.imag:.9f}")
            lines.append(" ".join(map(str, words)))
    path = tmp_path / "x_hr.dat"
    path.write_text("\n".join(lines))
    slabs = solvers.read_hr(path, momenta=3)
    for number, k in enumerate(2 * np.pi * np.arange(3) / 3):
        own = sum(h * np.exp(1j * k * c[1]) for c, h in terms.items() if c[0] == 0)
        np.testing.assert_allclose(slabs.onsite[0, number, 2:, 2:], own, atol=1e-8)
        at = [
            sum(h * np.exp(1j * (k * c[1] + x * c[0])) for c, h in terms.items())
            for x in (0.2, 0.2 + np.pi)
        ]
        hop = slabs.coupling[0, number] * np.exp(0.4j)
        folded = np.linalg.eigvalsh(slabs.onsite[0, number] + hop + star(hop))
        want = np.sort(np.linalg.eigvalsh(np.array(at)).ravel())
        np.testing.assert_allclose(folded, want, atol=1e-7)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a\nb\n", "a comment, numbers of functions"),
        ("", "a comment, numbers of functions"),
        ("a\n1\n0\n", "1 functions, 0 cells"),
        (HR.replace(" 2 1 2", " 2 1"), r"must have 3 degeneracies, .* got \[2 1\]"),
        (HR.replace(" 2 1 2", " 2 0 2"), r"all >= 1: got \[2 0 2\]"),
        (HR.replace("0 0 1 1  0.5", "0 0 0 1  0.5"), "each pair once"),
        (TWO_ORBITALS.replace("0 0 0 2 1", "1 0 0 2 1"), "in one piece"),
        (TWO_ORBITALS.replace("0 0 0 2 1", "0 0 0 1 1"), "each pair once"),
        (HR.replace("1 0 0 1 1 -2.0", "1 0 0 1 1 -3.0", 1), "must be Hermitian"),
    ],
)
def test_a_file_that_is_none_of_wannier90(tmp_path, text, match):
    path = tmp_path / "x_hr.dat"
    path.write_text(text)
    with pytest.raises(DataFormatError, match=match):
        solvers.read_hr(path)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"axis": 1}, "axes must differ"),
        ({"axis": 3}, "be 0, 1 or 2: got axis=3"),
        ({"slabs": 0}, "slabs must be an integer >= 1"),
        ({"momenta": 0}, "momenta must be an integer >= 1"),
    ],
)
def test_crystals_that_cannot_be_cut(tmp_path, given, match):
    (tmp_path / "x_hr.dat").write_text(HR)
    with pytest.raises(ConfigError, match=match):
        solvers.read_hr(tmp_path / "x_hr.dat", **given)


def changed(tree, path, value):
    """A tree with another value in a field of a field."""
    first, _, rest = path.partition(".")
    own = changed(getattr(tree, first), rest, value) if rest else value
    made = jax.tree.map(lambda x: x, tree)
    object.__setattr__(made, first, own)
    return made


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        ("phonons", solvers.junction(5).phonons, "need the same slabs"),
        ("phonons", solvers.junction(momenta=(3, 3)).phonons, "sub-grid"),
        ("masses", np.ones(3), r"masses must be \(4,\): got shape=\(3,\)"),
        ("masses", np.array([1, 1, 0, 1.0]), "masses must be above 0: got least=0"),
        ("masses", np.array([1, 1, np.nan, 1.0]), "masses must be above 0"),
        ("gradients", np.zeros((4, 2, 2, 2)), "gradients must be .atoms, bonds"),
        ("gradients", np.zeros((4, 3, 2, 2, 2)), r"neighbours must be \(4, 3\)"),
        ("gradients", np.zeros((4, 2, 2, 3, 3)), r"electrons.onsite must .*, 3, 3\)"),
        ("gradients", np.zeros((4, 2, 3, 2, 2)), r"phonons.onsite must .*, 3, 3\)"),
        ("electrons.onsite", np.zeros((4, 2, 2)), "electrons.onsite must be .slabs"),
        ("electrons.coupling", np.zeros((4, 4, 2, 2)), r"coupling must be \(3, 4, 2"),
        ("phonons.left.coupling", np.zeros((1, 2, 2)), r"left.coupling must be \(2, 2"),
        ("phonons.right.contact", np.zeros((2, 2, 1)), "right.contact must be"),
        ("electrons.right.onsite", np.ones((4, 2, 2)) * 1j, "right.onsite .*Hermitian"),
        ("phonons.left.onsite", np.tri(2) + np.zeros((2, 2, 2)), "left.* be Hermitian"),
        ("electrons.coupling", np.full((3, 4, 2, 2), np.nan), "coupling must be finit"),
        ("phonons.left.contact", np.full((2, 2, 2), np.inf), "contact must be finite"),
        ("gradients", np.full((4, 2, 2, 2, 2), 0.1j), r"own neighbour: got .*\[0\]"),
    ],
)
def test_devices_that_do_not_belong_together(path, value, match):
    good = solvers.junction(momenta=(4, 2))
    solvers.check_device(good)
    with pytest.raises(ConfigError, match=match):
        solvers.check_device(changed(good, path, value))


def test_a_pair_of_atoms_is_one_bond():
    """The squares of two gradients would be added, not their sum's square."""
    good = solvers.junction()
    twice = dataclasses.replace(
        good,
        neighbours=np.tile(good.neighbours, 2),
        gradients=np.tile(good.gradients / 2, (1, 2, 1, 1, 1)),
    )
    with pytest.raises(ConfigError, match=r"must be one bond.* twice=\[\(1, 0\)\]"):
        solvers.check_device(twice)
    twice.gradients[:, 2:] = 0
    solvers.check_device(twice)  # what fills up is none


def test_hopping_falls_with_the_square_of_a_bonds_length():
    """And gradients are its differences, here along the bonds of a chain."""

    def hopping(period):
        device = solvers.lattice(np.zeros((1, 3)), period, 3, directions=1, length=1.1)
        return device.electrons.coupling[0, 0, 0, 0], device.gradients[0, 0, 0, 0, 0]

    for period in (0.95, 1.1):
        (hop, slope), step = hopping(period), 1e-6
        assert hop == pytest.approx(-((1.1 / period) ** 2))
        above, below = hopping(period + step)[0], hopping(period - step)[0]
        assert slope == pytest.approx((above - below) / (2 * step), rel=1e-6)


def test_bonds_that_pass_over_a_slab_are_refused():
    with pytest.raises(ConfigError, match="slabs must be so long"):
        solvers.lattice(np.zeros((1, 3)), 0.5, 3, directions=1)


def test_gradients_of_a_bond_and_its_reverse_belong_together():
    device = solvers.junction()
    device.gradients[0, 1] *= 2
    with pytest.raises(ConfigError, match="gradients of"):
        solvers.check_device(device)


def test_bonds_of_thousands_of_atoms_are_checked_in_little_memory():
    device = solvers.ribbon(600, 2)
    tracemalloc.start()
    solvers.check_device(device)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 50 * device.gradients.nbytes


@pytest.mark.parametrize(("atom", "bond", "end"), [(0, 0, -1), (3, 1, 4)])
def test_neighbours_that_are_no_atoms_are_refused(atom, bond, end):
    device = solvers.junction()
    device.neighbours[atom, bond] = end
    with pytest.raises(ConfigError, match="neighbours must be atoms, 0 to 3"):
        solvers.check_device(device)


def test_one_precision_for_all_others():
    with jax.enable_x64(False):
        assert jnp.zeros(()).dtype == jnp.float32
