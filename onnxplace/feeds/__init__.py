"""Inputs of a model: declared types and sizes, checks, random values, .npz files."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.feeds.expressions import (
        MAX_DIMENSION as MAX_DIMENSION,
        MAX_RANK as MAX_RANK,
        without_derived as without_derived,
    )
    from onnxplace.feeds.feeds import (
        Array as Array,
        Declared as Declared,
        bound_shapes as bound_shapes,
        check_feeds as check_feeds,
        check_shape as check_shape,
        completed as completed,
        describe as describe,
        dimension_keys as dimension_keys,
        random_feeds as random_feeds,
        read_npz as read_npz,
        sizes_of as sizes_of,
        symbols_in as symbols_in,
        zero_feeds as zero_feeds,
    )
    from onnxplace.feeds.npz import require_storable as require_storable, write_npz as write_npz

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "expressions": "MAX_DIMENSION MAX_RANK without_derived",
        "feeds": (
            "Array Declared bound_shapes check_feeds check_shape completed describe dimension_keys random_feeds "
            "read_npz sizes_of symbols_in zero_feeds"
        ),
        "npz": "require_storable write_npz",
    },
)
