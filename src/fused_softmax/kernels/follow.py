"""Launches that begin while the one before them ends: programmatic dependent launch, of sm_90 and later.

A kernel launched so (`launch_pdl`) may be resident before the launch before it is done. Each of its programs waits,
before it reads or writes what that launch wrote. What earlier launches wrote is there if the launch before began as
usual, after all of them, or has waited for the one before it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_launch_before(FOLLOWS: tl.constexpr):
    if FOLLOWS:
        gdc_wait()


@triton.jit
def let_next_begin(LEADS: tl.constexpr):
    """The next launch may begin once every program has said so, or has ended."""
    if LEADS:
        gdc_launch_dependents()
