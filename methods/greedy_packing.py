"""Pack rows from what is in sight, oldest first, instead of by best fit over all: pack.window.

This is the Dense Prompt Packing of Dynamic Pruning (arXiv:2603.04135).
"""

from bisect import bisect_left, bisect_right, insort
from itertools import islice


def within_window(lengths: list[int], capacity: int, window: int) -> list[list[int]]:
    """Assign items to rows of at most `capacity` tokens, chosen from `window` items (pack.window) at a time.

    The window-based greedy packing of Dynamic Pruning (arXiv:2603.04135, section 4.3; a name and a purpose
    are known of it, so this is a reconstruction). A row begins with the oldest item in sight, which therefore
    never starves, and takes the longest in sight that still fits until none does; an item taken makes room
    for the next to come in sight. Never cuts and never drops; no item may be longer than a row.
    """
    coming = iter(enumerate(lengths))
    rows: list[list[int]] = []
    oldest: dict[int, int] = {}  # item -> length, in the order they came in sight
    longest: list[tuple[int, int]] = []  # (length, -item): of equal lengths the older one is taken

    def look() -> None:
        for i, length in islice(coming, window - len(oldest)):
            oldest[i] = length
            insort(longest, (length, -i))

    look()
    while oldest:
        rows.append([])
        room, taken = capacity, next(iter(oldest))
        while taken is not None:
            rows[-1].append(taken)
            length = oldest.pop(taken)
            room -= length
            longest.pop(bisect_left(longest, (length, -taken)))
            look()
            fits = bisect_right(longest, (room, 1))
            taken = -longest[fits - 1][1] if fits else None
    return rows
