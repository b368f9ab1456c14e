"""How many products a float32 sum of limbs holds exactly."""

EXACT = 2**24


def count_exact(left: int, right: int, *, unsigned: bool) -> int:
    """Returns how many products of limbs are at most 2^24 together.

    Args:
      left: bits of the left operand's limbs.
      right: of the right operand's.
      unsigned: whether there are limbs without a sign, of which one is as large as
        2^bits − 1 and not 2^(bits − 1).

    Examples:
      >>> count_exact(8, 8, unsigned=False), count_exact(8, 8, unsigned=True)
      (1024, 258)
    """

    def most(bits: int) -> int:
        return 2**bits - 1 if unsigned else 2 ** (bits - 1)

    return EXACT // (most(left) * most(right))
