"""One call after the other of a model with states: what is fed to each, and how a plain session carries states on."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnxplace.bundle import Bundle
from onnxplace.errors import ExecutionError, FeedError, ModelError, nearest
from onnxplace.feeds import (
    Array,
    Declared,
    check_feeds,
    complete_dimensions,
    dimension_keys,
    dimensions_of_feeds,
    random_feeds,
    read_npz,
    symbols_of_dimension,
    without_derived,
)

Feeds = Mapping[str, Array]


class StepInputs:
    """The inputs of each step: states in the first one only, later ones take over what the step before left.

    Where a state grows with each step, as a cache of past tokens does, inputs that are drawn grow with it if their
    shape names the symbol that grows: `past`, or `past + seq`, or what the output that becomes the state calls it.
    """

    def __init__(self, bundle: Bundle, given: Feeds | None, sizes: Mapping[str, int], seed: int) -> None:
        """Take the user's inputs, else draw them with these sizes of symbolic dimensions."""
        self._inputs = (
            bundle.inputs if given is not None else [_with_sample_rank(item, sizes) for item in bundle.inputs]
        )
        self._sizes, self._seed = sizes, seed
        self._states = {item.name: item.shape or () for item in bundle.state_inputs}
        given_back = {item.name: item.shape or () for item in bundle.outputs}
        self._outputs = {item.input: given_back[item.output] for item in bundle.manifest.states}
        self._drawn = given is None
        self._growth: dict[str, int] = {}
        self._output_growth: dict[str, int] = {}
        self.first: Feeds = (
            random_feeds(self._inputs, sizes, seed) if given is None else check_feeds(given, self._inputs)
        )
        dimensions_of_feeds(self.first, self._inputs)

    def learn(self, states: Feeds) -> None:
        """Find out from the states after the first step, by input, which symbols grow."""
        for name, array in states.items():
            if name in self.first:
                grown = [after - before for before, after in zip(self.first[name].shape, array.shape)]
                self._growth |= {s: by for s, by in zip(self._states[name], grown) if isinstance(s, str) and s}
                named = zip(self._outputs[name], grown)
                self._output_growth |= {s: by for s, by in named if isinstance(s, str) and s and by > 0}

    def feeds(self, number: int) -> Feeds:
        """Return the inputs of a step, counted from 0."""
        if number == 0 or not self._states:
            return self.first
        found = self.first
        grown = {key: size + number * self._growth_of(key) for key, size in self._sizes.items()}
        if self._drawn and grown != self._sizes:
            inputs = [item for item in self._inputs if item.name not in self._states]
            found = random_feeds(inputs, grown, self._seed)
        return {name: array for name, array in found.items() if name not in self._states}

    @contextmanager
    def explained(self, number: int) -> Iterator[None]:
        """Say in the hint of an error of a later step, counted from 0, which inputs did not grow as the states did."""
        try:
            yield
        except (ExecutionError, ModelError) as problem:
            hint = self._left_behind() if number else ""
            if not hint:
                raise
            raise type(problem)(problem.code, problem.message, where=problem.where, hint=hint) from None

    def _left_behind(self) -> str:
        growing = [symbol for symbol, by in self._growth.items() if by > 0]
        axes = [
            f"{item.name}[{axis}] ({size!r})"
            for item in self._inputs
            for axis, size in enumerate(item.shape or ())
            # An axis that the states have too, and that did not grow there, has no need to.
            if item.name not in self._states and isinstance(size, str) and size not in self._growth
            if not self._growth_of(size)
        ]
        if not growing or not axes:
            return ""
        one = "to see one step alone: --steps 1, or --repeat 1"
        names = ", ".join(repr(symbol) for symbol in growing)
        if not self._drawn:
            return f"the given inputs are the same in each step, while states grow along {names}; {one}"
        return (
            f"states grow along {names} from step to step, drawn inputs only along axes that are named after it; if "
            f"{' or '.join(axes)} has to grow too, rename it ('{growing[0]} + ...'); {one}"
        )

    def _growth_of(self, key: str) -> int:
        found = [by for symbol, by in self._growth.items() if re.search(rf"(?<!\w){re.escape(symbol)}(?!\w)", key)]
        return sum(found) if found else self._output_growth.get(key, 0)


def choose_step_inputs(bundle: Bundle, inputs: Path | None, sizes: Mapping[str, int], seed: int) -> StepInputs:
    """Return the inputs in a file, else random ones of the shapes the bundle was compiled with, or of these `sizes`.

    Raises FeedError for a dimension that the model does not have.
    """
    remembered = bundle.manifest.dimensions
    ranked = [_with_sample_rank(item, remembered) for item in bundle.inputs]
    keys = dict.fromkeys(key for item in ranked for key, size in dimension_keys(item) if size is None)
    known = sorted({name for key in keys for name in (key, *symbols_of_dimension(key))})
    for key in sizes:
        if key not in known:
            hint = nearest(key, known) if known else "all its dimensions are fixed"
            raise FeedError("M022", f"the model has no symbolic dimension {key!r}", where="--shape", hint=hint)
    # What the bundle was compiled with gives way to these sizes, and to what follows from them.
    given = complete_dimensions(keys, sizes)
    kept = {
        key: size
        for key, size in without_derived(remembered).items()
        if key not in given and not given.keys() & symbols_of_dimension(key)
    }
    all_sizes = without_derived(complete_dimensions(keys, {**kept, **sizes}))
    return StepInputs(bundle, read_npz(inputs) if inputs else None, all_sizes, seed)


def _with_sample_rank(item: Declared, sizes: Mapping[str, int]) -> Declared:
    """Return an input of unknown rank with that of the sample it was compiled with, if there was one."""
    if item.shape is not None:
        return item
    keys = itertools.takewhile(lambda key: key in sizes, (f"{item.name}.{axis}" for axis in itertools.count()))
    return replace(item, shape=tuple(keys) or None)


class StateCarrier:
    """Call a function that runs the whole model, handing the states that it gives back to the next call."""

    def __init__(self, run: Callable[[Feeds], Mapping[str, Any]], bundle: Bundle) -> None:
        self._run = run
        self._pairs = [(item.output, item.input) for item in bundle.manifest.states]
        self.states: dict[str, Any] = {}
        """What the last call left, by state input."""

    def __call__(self, feeds: Feeds) -> Mapping[str, Any]:
        outputs = self._run({**self.states, **feeds})
        self.states = {name: outputs[output] for output, name in self._pairs}
        return outputs
