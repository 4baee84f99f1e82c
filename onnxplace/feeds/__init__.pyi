from onnxplace.feeds.dimensions import (
    MAX_DIMENSION as MAX_DIMENSION,
    MAX_RANK as MAX_RANK,
    complete_dimensions as complete_dimensions,
    dimension_keys as dimension_keys,
    dimensions_of_feeds as dimensions_of_feeds,
    drop_derived_sizes as drop_derived_sizes,
    resolve_shapes as resolve_shapes,
    symbols_of_dimension as symbols_of_dimension,
)
from onnxplace.feeds.feeds import (
    Array as Array,
    Declared as Declared,
    check_feeds as check_feeds,
    check_shape as check_shape,
    describe_input as describe_input,
    numpy_type as numpy_type,
)
from onnxplace.feeds.npz import read_npz as read_npz, require_storable as require_storable, write_npz as write_npz
from onnxplace.feeds.synthetic import random_feeds as random_feeds, zero_feeds as zero_feeds
