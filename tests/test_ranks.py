"""The pool of ranks that tests of groups share."""

import time

import pytest
from ranks import pool


def rank_of(group, seconds):
    if group.rank() == 1:
        time.sleep(seconds)
    return group.rank()


@pytest.mark.exhaustive
def test_a_late_answer_is_not_that_to_the_next_question():
    with pool() as ranks:
        assert ranks(2, rank_of, 0) == [0, 1]
        with pytest.raises(TimeoutError, match="rank 1 did not answer"):
            ranks(2, rank_of, 30, limit=1)
        assert ranks(3, rank_of, 0) == [0, 1, 2]
