"""Numbers of entries and words that exchanges send; imports no JAX."""

Count = int | float


def entries_wanted(density: float, n: int) -> int:
    """Returns k = max(1, floor(d n)), at most n.

    Examples:
      >>> entries_wanted(0.01, 1000), entries_wanted(0.01, 5), entries_wanted(0.29, 100)
      (10, 1, 29)
    """
    # In floating point, 0.29 * 100 is a little less than 29.
    return min(n, max(1, int(density * n * (1 + 1e-12))))


def dense_words(n: Count, members: int) -> float:
    """Returns 2 n (P − 1) / P, what each of P members sends in a ring all-reduce.

    n is in words or bytes, and so is the result. Between processes, messages of less
    than 128 KiB go by recursive doubling instead: fewer messages, but up to n log2 P
    words.

    Examples:
      >>> dense_words(1000, 4)
      1500.0
    """
    return 2 * n * (members - 1) / members
