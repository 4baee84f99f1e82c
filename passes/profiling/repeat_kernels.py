"""Find repetitions in a sequence, on flat arrays.

`names[k, i]` numbers the substring of `2 ** k` items from `i` on, in lexicographic order: two substrings are equal
exactly if their numbers are. Substrings that would reach beyond the end have -1.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.utils.jit import compiled_part, linear_loop


@compiled_part
def count_equal_after(names, i, j):
    """Return how many items from `i` on equal those from `j` on."""
    length, same = names.shape[1], 0
    for k in range(names.shape[0] - 1, -1, -1):
        block = 1 << k
        if i + block <= length and j + block <= length and names[k, i] == names[k, j]:
            i, j, same = i + block, j + block, same + block
    return same


@compiled_part
def count_equal_before(names, i, j):
    """Return how many items before `i` equal those before `j`."""
    same = 0
    for k in range(names.shape[0] - 1, -1, -1):
        block = 1 << k
        if i >= block and j >= block and names[k, i - block] == names[k, j - block]:
            i, j, same = i - block, j - block, same + block
    return same


@linear_loop
def find_runs(names):
    """Return start, end and smallest period of every maximal repetition.

    A repetition has at least twice its period. The algorithm of Bannai, I, Inenaga, Nakashima, Takeda and Tsuruta, "The
    'Runs' Theorem" (SIAM J. Computing 2017): a repetition's period is the length of the longest Lyndon word from some
    position on, under the order of the items or its reverse; those words end where the next smaller suffix begins. O(N
    log N).
    """
    length, count = names.shape[1], 0
    repetitions = np.empty((3, 2 * length), np.int64)
    following = np.empty(length, np.int64)
    # Lyndon words under the order of the items, then under its reverse.
    for reverse in range(2):
        for i in range(length - 1, -1, -1):
            j = i + 1
            while j < length:
                same = count_equal_after(names, i, j)
                if j + same == length:  # the later suffix is a beginning of the earlier one, so it is smaller
                    break
                lower = names[0, j + same] < names[0, i + same]
                if lower != (reverse == 1):
                    break
                j = following[j]
            following[i] = j
            # The Lyndon word from i to j is a period: extend its repetition to both sides.
            period = j - i
            if j < length:
                after, before = count_equal_after(names, i, j), count_equal_before(names, i, j)
                if after + before >= period:
                    repetitions[0, count], repetitions[1, count], repetitions[2, count] = i - before, j + after, period
                    count += 1
    return repetitions[0, :count], repetitions[1, :count], repetitions[2, :count]
