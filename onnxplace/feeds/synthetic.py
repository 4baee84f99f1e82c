"""Feeds without data: random values and zeros for declared inputs."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxplace.errors import FeedError
from onnxplace.feeds.dimensions import resolve_shapes
from onnxplace.feeds.feeds import Array, Declared, numpy_type

# What a process can address on x86-64: the limit on systems that do not report their memory.
_ADDRESSABLE_BYTES = 1 << 47
# Random values are drawn as 64-bit numbers.
_DRAWN_BYTES = 8


def random_feeds(inputs: Sequence[Declared], dimensions: Mapping[str, int], seed: int = 0) -> dict[str, Array]:
    """Return random inputs: standard normal floats, and integers that are 0 or 1.

    0 and 1 are valid indices nearly everywhere. `dimensions` gives sizes to symbolic dimensions, by symbol or as
    `input.axis`. Raises FeedError listing those without a size, and for types that cannot be generated.

    >>> random_feeds([Declared("x", "tensor(float)", ("batch", 4))], {"batch": 2})["x"].shape
    (2, 4)
    """
    shapes = resolve_shapes(inputs, dimensions)
    _require_room(shapes)
    random = np.random.default_rng(seed)
    return {item.name: _random_array(random, item, shapes[item.name]) for item in inputs if item.name in shapes}


def zero_feeds(inputs: Sequence[Declared], dimensions: Mapping[str, int]) -> dict[str, Array]:
    """Return zeros, false or empty strings for inputs; sizes and errors as in `random_feeds`.

    >>> zero_feeds([Declared("x", "tensor(bool)", ("n",))], {"n": 2})
    {'x': array([False, False])}
    """
    shapes = resolve_shapes(inputs, dimensions)
    _require_room(shapes)
    return {
        item.name: np.full(shapes[item.name], "", dtype=object)
        if item.dtype == "tensor(string)"
        else np.zeros(shapes[item.name], _generated_type(item))
        for item in inputs
        if item.name in shapes
    }


def _require_room(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise FeedError if inputs of these shapes would take more than half of all memory.

    Each element counts as 8 bytes: values are drawn in one type and converted to another, so that the largest array
    exists twice for a moment.
    """
    try:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # the system does not report it
        memory_bytes = _ADDRESSABLE_BYTES
    sizes = {name: _DRAWN_BYTES * math.prod(shape) for name, shape in shapes.items()}
    if 2 * sum(sizes.values()) > memory_bytes:
        name = max(sizes, key=sizes.__getitem__)
        message = f"expected inputs of at most {memory_bytes // 2} bytes, half of the memory, got {sum(sizes.values())}"
        hint = "give smaller sizes with --shape, or real inputs with --inputs F.npz"
        raise FeedError("M022", message, where=f"input {name!r} {list(shapes[name])}", hint=hint)


def _random_array(random: np.random.Generator, item: Declared, shape: tuple[int, ...]) -> Array:
    """Return an array of random values for an input."""
    if item.dtype == "tensor(string)":
        return np.full(shape, "a", dtype=object)
    dtype = _generated_type(item)
    if dtype.kind in "iub" or dtype.name.startswith(("int", "uint")):
        return random.integers(0, 2, shape).astype(dtype)
    if dtype.kind == "c":
        return (random.standard_normal(shape) + 1j * random.standard_normal(shape)).astype(dtype)
    return random.standard_normal(shape).astype(dtype)


def _generated_type(item: Declared) -> np.dtype[Any]:
    """Return the numpy type of an input; raises FeedError if numpy has none."""
    if (dtype := numpy_type(item.dtype)) is None:
        message = f"expected a tensor type that numpy has, got {item.dtype}: no value can be generated"
        hint = "give real inputs with --inputs F.npz"
        raise FeedError("M020", message, where=f"input {item.name!r}", hint=hint)
    return dtype
