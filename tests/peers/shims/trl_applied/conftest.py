"""TRL itself, which must be installed, with this package in place of its functions before a test imports them."""

import fused_softmax.trl

fused_softmax.trl.apply()
