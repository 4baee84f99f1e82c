"""One call after the other of a model with states: what is fed to each, and how a plain session carries states on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from onnxplace.bundle import Bundle
from onnxplace.feeds import Array, check_feeds, random_feeds

Feeds = Mapping[str, Array]


class Steps:
    """The inputs of each step: states in the first one only, later ones take over what the step before left.

    Where a state grows with each step, as a cache of past tokens does, inputs that are drawn grow with it if their
    shape names the symbol that grows: `past`, or `past + seq`.
    """

    def __init__(self, bundle: Bundle, given: Feeds | None, sizes: Mapping[str, int], seed: int) -> None:
        """Take the user's inputs, else draw them with these sizes of symbolic dimensions."""
        self._inputs, self._sizes, self._seed = bundle.inputs, sizes, seed
        self._states = {item.name: item.shape or () for item in bundle.state_inputs}
        self._drawn = given is None
        self._growth: dict[str, int] = {}
        self.first: Feeds = (
            random_feeds(self._inputs, sizes, seed) if given is None else check_feeds(given, self._inputs)
        )

    def learn(self, states: Feeds) -> None:
        """Find out from the states after the first step, by input, which symbols grow."""
        for name, array in states.items():
            if name in self.first:
                sizes = zip(self._states[name], self.first[name].shape, array.shape)
                self._growth |= {s: after - before for s, before, after in sizes if isinstance(s, str) and s}

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

    def _growth_of(self, key: str) -> int:
        return sum(
            growth for symbol, growth in self._growth.items() if re.search(rf"(?<!\w){re.escape(symbol)}(?!\w)", key)
        )


class Carrying:
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
