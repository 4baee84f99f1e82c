"""What a session checks before a request: the names of outputs, and the feeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onnxplace.bundle import Bundle, SplitStates
from onnxplace.drop_in.exceptions import also_raise_as
from onnxplace.drop_in.ort_conversion import unwrap_ort_values
from onnxplace.errors import UsageError, format_names, format_value, suggest_nearest
from onnxplace.feeds import Declared, check_feeds

FeedSignature = tuple[tuple[str, "np.dtype[Any]", tuple[int, ...]], ...]
"""Name, type and shape of each input array."""


class RequestChecks:
    """The inputs and outputs of a bundle, and what was found right in an earlier request."""

    def __init__(self, bundle: Bundle) -> None:
        self.split_states = SplitStates(bundle.manifest)
        self._run_inputs = _make_states_optional(bundle)
        self._output_names = [item.name for item in bundle.outputs]
        self._returned_names = [item.name for item in bundle.returned_outputs]
        self._state_outputs = {item.output for item in bundle.manifest.states}
        self._accepted_signature: FeedSignature | None = None
        self._labels = bundle.manifest.training.labels if bundle.manifest.training else ()
        # Of texts and labels, the content is checked too, so that nothing is known of those of the next request.
        self._can_repeat = not self._labels and not any("string" in item.dtype for item in bundle.inputs)

    def check_feeds(self, input_feed: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the feeds as arrays, and the states among the output names; raises FeedError."""
        states = [name for name in names if name in self._state_outputs] if self._state_outputs else []
        if self.split_states and isinstance(input_feed, Mapping):
            input_feed = self.split_states.cut_feeds(unwrap_ort_values(input_feed))
        signature = _make_signature(input_feed)
        if signature is not None and signature == self._accepted_signature:
            return dict(input_feed), states
        feeds = check_feeds(input_feed if signature else unwrap_ort_values(input_feed), self._run_inputs)
        for labels in self._labels:
            labels.check(feeds)
        if (
            self._can_repeat
            and signature is not None
            and all(feeds[name] is value for name, value in input_feed.items())
        ):
            self._accepted_signature = signature
        return feeds, states

    def resolve_parts(self, output_names: Iterable[str] | None) -> list[str]:
        """Return the names of outputs, with those of parts in place of states that are split over devices."""
        return self.split_states.expand_names(self.resolve_names(output_names))

    def resolve_names(self, output_names: Iterable[str] | None) -> list[str]:
        """Return the names of outputs, by default of all except states; raises UsageError for an unknown one."""
        if isinstance(output_names, str | Mapping) or not isinstance(output_names, Iterable | None):
            hint = f"write [{output_names!r}]" if isinstance(output_names, str) else "None stands for all outputs"
            raise _make_kind_error(f"expected a list of output names, got {format_value(output_names)}", hint)
        names = list(output_names or ())
        if bad := [name for name in names if not isinstance(name, str)]:
            message = f"expected texts as names of outputs, got {format_value(bad[0])}"
            raise _make_kind_error(message, f"known: {format_names(self._output_names, quoted=False)}")
        for name in names:
            if name not in self._output_names and not self.split_states.expand_names([name])[1:]:
                raise UsageError(
                    "U050", f"the model has no output {name!r}", hint=suggest_nearest(name, self._output_names)
                )
        return names or list(self._returned_names)


def _make_kind_error(message: str, hint: str) -> UsageError:
    """Return the error for names of outputs of a wrong kind, for which ONNX Runtime raises TypeError."""
    return also_raise_as(UsageError("U050", message, hint=hint), TypeError)


_ARRAYS = frozenset({np.ndarray})


def _make_signature(feeds: Mapping[str, Any]) -> FeedSignature | None:
    """Return all that `check_feeds` checks, if all feeds are plain arrays.

    A signature that passed once need not be checked again.
    """
    if not isinstance(feeds, Mapping) or not _ARRAYS.issuperset(map(type, feeds.values())):
        return None
    return tuple([(name, value.dtype, value.shape) for name, value in feeds.items()])


def _make_states_optional(bundle: Bundle) -> list[Declared]:
    """Return the inputs of a run, in which states are optional."""
    states = {item.name for item in bundle.state_inputs}
    return [replace(item, optional=True) if item.name in states else item for item in bundle.inputs]
