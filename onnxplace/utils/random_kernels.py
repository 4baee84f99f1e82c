"""Random numbers for compiled loops, whose generator is an array of one integer."""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numpy as np

from onnxplace.utils.jit import compiled_part


@compiled_part
def random_uniform(rng):
    """Draw uniformly from [0, 1): xorshift64 (Marsaglia 2003)."""
    x = np.uint64(rng[0])
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    rng[0] = np.int64(x)
    # The upper 53 bits fill the mantissa of a float; the factor is 2^-53.
    return np.float64(x >> np.uint64(11)) * (1.0 / 9007199254740992.0)
