"""What a prepared call is, and how calls are composed of others."""

from collections.abc import Callable
from typing import Any

Call = Callable[..., Any]


def for_its_own_number(n: int, of: int) -> None:
    """The `for_rows` of a call that is only for its own number of rows."""


class Launched:
    """A prepared call: call it with tensors like those that it was prepared for.

    It allocates and launches, and decides nothing. It holds no tensor of any call.

    for_rows: (n, of) -> the function of the same call, for tensors that have n leading rows where it had `of`; None if
        that takes another plan or another kernel.
    like: allocates a result as this call does, so that a call which takes such a result can be prepared.
    by_row: whether its tensors that have one dim less than the input hold one value a row.
    """

    # Functions in the slots are called with no Python method in between.
    __slots__ = ("__call__", "by_row", "for_rows", "like")

    def __init__(
        self,
        call: Call,
        for_rows: Callable[[int, int], Call | None] = for_its_own_number,
        *,
        like: Callable[[], Any] | None = None,
        by_row: bool = False,
    ):
        self.__call__, self.for_rows, self.like, self.by_row = call, for_rows, like, by_row

    @property
    def of_any_rows(self) -> bool:
        return self.for_rows is not for_its_own_number


def compose(
    build: Callable[..., Call],
    *parts: Launched | None,
    n: int | None = None,
    like: Callable[[], Any] | None = None,
    by_row: bool = False,
) -> Launched:
    """The call `build(n, *functions of the parts)`. None stands for a part that it does without.

    n: how many leading rows the call has. It can be made for another number of them if all of its parts can.
    """

    def for_rows(m: int, of: int) -> Call | None:
        calls = []
        for part in parts:  # a server's new batch size: no frame more than needed
            call = part and part.for_rows(m, of)
            if call is None and part is not None:
                return None
            calls.append(call)
        return build(n // of * m, *calls)  # type: ignore[operator]

    call = build(n, *[part and part.__call__ for part in parts])
    return Launched(call, for_its_own_number if n is None else for_rows, like=like, by_row=by_row)


def of_rows(launch: Any, for_rows: Callable[[int], Call | None], n: int) -> Launched:
    """A kernel's launch for n rows, as a call. for_rows: what launches it for another number of them, or None."""
    return Launched(launch.__call__, lambda m, of: for_rows(n // of * m))
