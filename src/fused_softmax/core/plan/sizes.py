"""The arithmetic of sizes that every part of the planner shares."""

VECTOR_BYTES = 16  # the widest access of one thread
UNBOUNDED = 2**62  # more than any size

Span = tuple[int, int]  # numbers of rows, both ends included
ANY_ROWS: Span = (1, UNBOUNDED)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def side_of(n_rows: int, last: int) -> Span:
    """The rows on n_rows' side of a threshold: up to `last`, or all above it."""
    return (1, last) if n_rows <= last else (last + 1, UNBOUNDED)


def both(one: Span, other: Span) -> Span:
    """The rows that lie in both spans."""
    return max(one[0], other[0]), min(one[1], other[1])
