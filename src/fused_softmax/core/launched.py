"""What a prepared call is, and how calls are made of others."""

from collections.abc import Callable
from typing import Any

Call = Callable[..., Any]


class Launched:
    """A prepared call: call it with tensors like those that it was prepared for.

    It allocates and launches, and decides nothing. It holds no tensor of any call.

    like: what allocates its result, for preparing a call that takes that.
    by_row: whether its tensors of one dim less than the input hold one value a row.
    """

    # A function in the slot of `__call__` is called with no Python method in between.
    __slots__ = ("__call__", "_remake", "by_row", "like")

    def __init__(
        self,
        call: Call,
        remake: "Callable[[int, int], Launched | None] | None" = None,
        *,
        like: Callable[[], Any] | None = None,
        by_row: bool = False,
    ):
        self.__call__, self._remake, self.like, self.by_row = call, remake, like, by_row

    def for_rows(self, n: int, of: int) -> "Launched | None":
        """The same call for tensors of which n leading rows stand where it had `of`.

        None where that takes another plan or another kernel, and where the call is for its own number alone.
        """
        return None if self._remake is None else self._remake(n, of)

    @property
    def of_any_rows(self) -> bool:
        return self._remake is not None


def compose(
    build: Callable[..., Call],
    *parts: Launched | None,
    n: int | None = None,
    like: Callable[[], Any] | None = None,
    by_row: bool = False,
) -> Launched:
    """The call `build(n, *functions of the parts)`, in which None stands for a part that it does without.

    n: how many leading rows the call has. It can then be made for another number of them, if all of its parts can.
    """

    def remake(m: int, of: int) -> Launched | None:
        assert n is not None
        others = [part and part.for_rows(m, of) for part in parts]
        if any(other is None for other, part in zip(others, parts, strict=True) if part is not None):
            return None
        return compose(build, *others, n=n // of * m, like=like, by_row=by_row)

    call = build(n, *[part and part.__call__ for part in parts])
    return Launched(call, None if n is None else remake, like=like, by_row=by_row)


def of_rows(launch: Any, for_rows: Callable[[int], Any], n: int) -> Launched:
    """A kernel's launch for n rows, as a call. for_rows: the launch for another number of them, or None."""

    def remake(m: int, of: int) -> Launched | None:
        other = for_rows(n // of * m)
        return None if other is None else of_rows(other, for_rows, n // of * m)

    return Launched(launch.__call__, remake)
