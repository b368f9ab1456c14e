"""How far sums may be apart that are added in another order."""

import numpy as np


def assert_sums_close(found, expected, *, terms, largest=None):
    """Checks float32 sums of `terms` products against others.

    Rounding is relative to the largest magnitude that was added on the way, however
    small what is left of it, and grows with the root of the number of terms:
    8 eps sqrt(terms) times that magnitude. Of one array it is by default the largest
    of the expected numbers, whose terms can be no smaller.
    """
    found, expected = np.asarray(found), np.asarray(expected)
    scale = np.abs(expected).max() if largest is None else largest
    atol = 8 * np.finfo(np.float32).eps * np.sqrt(terms) * scale
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
