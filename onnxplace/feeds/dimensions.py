"""Sizes of symbolic dimensions: given, read off arrays, or computed from others."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from onnxplace.errors import MAX_LISTED, FeedError, format_names
from onnxplace.feeds.expressions import NoSizeError, complete_sizes, parse_size, symbols_of
from onnxplace.feeds.feeds import Declared


def resolve_shapes(inputs: Sequence[Declared], dimensions: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each required input.

    Dimensions named by an expression, `past + seq`, follow from their symbols. Raises FeedError listing the dimensions
    without a size.

    >>> resolve_shapes([Declared("x", "tensor(float)", ("batch", 4))], {"batch": 2})
    {'x': (2, 4)}
    """
    shapes = {item.name: dimension_keys(item) for item in inputs if not item.optional}
    unsized = dict.fromkeys(key for keys in shapes.values() for key, size in keys if size is None)
    sizes = complete_dimensions(unsized, dimensions)
    symbols = (symbol for key in unsized if key not in sizes for symbol in symbols_of_dimension(key))
    if unbound := list(dict.fromkeys(symbol for symbol in symbols if symbol not in sizes)):
        raise _unbound_error(unbound)
    return {name: tuple(sizes[key] if size is None else size for key, size in keys) for name, keys in shapes.items()}


def complete_dimensions(keys: Iterable[str], dimensions: Mapping[str, int]) -> dict[str, int]:
    """Return `dimensions` and all sizes that follow from them; raises FeedError for contradictions.

    >>> complete_dimensions(["past + seq"], {"past": 5, "seq": 1})
    {'past': 5, 'seq': 1, 'past + seq': 6}
    """
    try:
        return complete_sizes(keys, dimensions)
    except NoSizeError as problem:
        hint = "give only the sizes of symbols: those of expressions follow from them"
        raise FeedError("M022", str(problem), where="--shape", hint=hint) from None


def symbols_of_dimension(key: str) -> list[str]:
    """Return the names that determine a dimension's size: its own, or the symbols of its expression.

    >>> symbols_of_dimension("batch"), symbols_of_dimension("past + seq")
    (['batch'], ['past', 'seq'])
    """
    term = parse_size(key)
    return [key] if term is None else list(dict.fromkeys(symbols_of(term)))


def _unbound_error(names: Sequence[str]) -> FeedError:
    """Return the error for dimensions without a size, with an example of how to give them."""
    example = shlex.quote(",".join(f"{name}=1" for name in names[:MAX_LISTED]) + ",..." * (len(names) > MAX_LISTED))
    hint = f"give them, such as --shape {example}, or real inputs with --inputs F.npz"
    return FeedError("M020", f"symbolic dimensions without a value: {format_names(names, quoted=False)}", hint=hint)


def dimensions_of_feeds(feeds: Mapping[str, Any], inputs: Sequence[Declared]) -> dict[str, int]:
    """Return the sizes that arrays give to symbolic dimensions, and those that follow.

    Where a symbol has several sizes, 1 gives way to the other size, as it may be broadcast. Raises FeedError if the
    sizes contradict a dimension that is an expression.

    >>> import numpy as np
    >>> dimensions_of_feeds({"x": np.zeros((2, 4))}, [Declared("x", "tensor(double)", ("batch", 4))])
    {'batch': 2}
    """
    sizes: dict[str, int] = {}
    for item in inputs:
        if item.name in feeds and item.dtype.startswith("tensor(") and item.shape is not None:
            for (key, fixed), size in zip(dimension_keys(item), feeds[item.name].shape):
                if fixed is None and sizes.get(key, 1) == 1:
                    sizes[key] = size
    # A 1 may be broadcast, so that it does not determine the symbols of an expression.
    certain = {key: size for key, size in sizes.items() if size != 1 or parse_size(key) is None}
    try:
        return {**sizes, **complete_sizes(sizes, certain)}
    except NoSizeError as problem:
        raise FeedError("F005", f"the inputs contradict each other: {problem}") from None


def dimension_keys(item: Declared) -> list[tuple[str, int | None]]:
    """Return each dimension as (key by which users give its size, size if known).

    >>> dimension_keys(Declared("x", "tensor(float)", ("batch", None, 4)))
    [('batch', None), ('x.1', None), ('x.2', 4)]
    """
    if not item.dtype.startswith("tensor("):
        return []
    if item.shape is None:
        return [(f"{item.name}.shape", None)]
    return [
        (entry, None) if isinstance(entry, str) else (f"{item.name}.{axis}", entry)
        for axis, entry in enumerate(item.shape)
    ]
