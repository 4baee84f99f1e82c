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
        check_feeds as check_feeds,
        check_shape as check_shape,
        complete_dimensions as complete_dimensions,
        describe_input as describe_input,
        dimension_keys as dimension_keys,
        dimensions_of_feeds as dimensions_of_feeds,
        random_feeds as random_feeds,
        read_npz as read_npz,
        resolve_shapes as resolve_shapes,
        symbols_of_dimension as symbols_of_dimension,
        zero_feeds as zero_feeds,
    )
    from onnxplace.feeds.npz import require_storable as require_storable, write_npz as write_npz

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "expressions": "MAX_DIMENSION MAX_RANK without_derived",
        "feeds": (
            "Array Declared check_feeds check_shape complete_dimensions describe_input dimension_keys "
            "dimensions_of_feeds random_feeds read_npz resolve_shapes symbols_of_dimension zero_feeds"
        ),
        "npz": "require_storable write_npz",
    },
)
