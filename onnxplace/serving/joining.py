"""Join the feeds of requests along the axes of their batch, and cut the outputs."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from onnxplace.bundle import BatchingRecord
from onnxplace.feeds import Array

# Inputs that have to be equal are compared by their bytes, up to this size.
MAX_COMPARED_BYTES = 1 << 16


class Joiner:
    """The axes along which requests of a bundle are joined."""

    def __init__(self, record: BatchingRecord) -> None:
        self._inputs = record.inputs
        self._outputs = record.outputs

    def describe_feeds(self, feeds: Mapping[str, Any]) -> tuple[int, Hashable | None]:
        """Return the size of a request's batch, and what other requests must have in common with it.

        None stands for a request that runs alone: without a batch, with broadcast inputs of it, or with other inputs
        that are too large to be compared.
        """
        sizes, entries = set(), []
        for name in sorted(feeds):
            value = feeds[name]
            if not isinstance(value, np.ndarray):
                return 0, None
            axis = self._inputs.get(name)
            if axis is None:
                if value.dtype.hasobject or value.nbytes > MAX_COMPARED_BYTES:
                    return 0, None
                entries.append((name, value.dtype, value.shape, value.tobytes()))
            else:
                sizes.add(value.shape[axis])
                entries.append((name, value.dtype, value.shape[:axis], value.shape[axis + 1 :]))
        if len(sizes) != 1 or 0 in sizes or not self._inputs.keys() <= feeds.keys():
            return 0, None
        return sizes.pop(), tuple(entries)

    def join_feeds(self, feeds: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
        """Return the feeds of all requests as one, in their order."""
        return {
            name: np.concatenate([item[name] for item in feeds], axis=self._inputs[name])
            if name in self._inputs
            else value
            for name, value in feeds[0].items()
        }

    def cut_outputs(self, outputs: Mapping[str, Any], sizes: Sequence[int]) -> list[dict[str, Any]]:
        """Return the outputs of each request; they share no memory.

        Raises ValueError if an output does not have the same number of entries for each request of the batch.
        """
        total = sum(sizes)
        parts: list[dict[str, Any]] = [{} for _ in sizes]
        for name, value in outputs.items():
            axis = self._outputs.get(name)
            if axis is None:
                for part in parts:
                    part[name] = copy.deepcopy(value)
                continue
            if axis >= value.ndim or value.shape[axis] % total or not value.shape[axis]:
                raise ValueError(f"output {name!r} of shape {list(value.shape)} holds no batch of {total}")
            ends = np.cumsum(sizes) * (value.shape[axis] // total)
            for part, piece in zip(parts, np.split(value, ends[:-1], axis=axis), strict=True):
                part[name] = piece.copy()
        return parts
