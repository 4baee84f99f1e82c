"""What a session knows beyond its requests: carried states, timelines, and copies of the bundle."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxplace.bundle import Bundle, SplitStates
from onnxplace.errors import UsageError
from onnxplace.runtime import CopyStatus, RuntimeSession
from onnxplace.serving.options import check_in_flight
from onnxplace.traces import (
    MAX_TRACED_REQUESTS,
    RequestTimeline,
    TraceRecorder,
    chrome_trace,
    predict_timelines,
    read_segment_nodes,
)


class SessionState:
    """The methods of a session that are about its states, its trace and its copies."""

    _bundle: Bundle
    _session: RuntimeSession
    _split_states: SplitStates
    _recorder: TraceRecorder | None

    def reset_state(self) -> None:
        """Forget all states; the next run takes initial values as inputs.

        Runs in flight are not affected.
        """
        self._session.states.reset()

    def read_states(self) -> dict[str, Any]:
        """Return copies of the current states by state input, after the runs in flight; no run is needed.

        States that are split over devices are whole. States that no run has computed have their initial values, or are
        missing if they have none.

        Raises FeedError after a run that lost the states, and UsageError if the runtime cannot read them.
        """
        states = {**self._bundle.initial_states(), **self._session.states.read()}
        return self._split_states.join_feeds({name: np.array(array) for name, array in states.items()})

    def protect_states(self) -> None:
        """Keep the states before each run: they are back if it fails, and after `restore_states`.

        That takes memory for a second set of states.
        """
        self._session.states.protect()

    def restore_states(self) -> None:
        """Bring back the states before the last run that succeeded, once; they have to be protected."""
        self._session.states.restore()

    def count_state_changes(self) -> int:
        """Return how many runs have changed the states, after the runs in flight; a restored one does not count.

        After an interrupt it tells whether the run that was interrupted had an effect.
        """
        return self._session.states.count_changes()

    def trace(self, last: int = MAX_TRACED_REQUESTS) -> dict[str, Any]:
        """Return the timelines of the last requests, 1 to 1000, as Chrome trace JSON; needs `trace=True`.

        It has the requests that have succeeded, also those of conversations. Next to them it has the prediction for
        requests that are submitted at the same times. Perfetto opens it, too (docs/traces.md).

        >>> Path("trace.json").write_text(json.dumps(session.trace()))  # doctest: +SKIP
        """
        count = check_in_flight(last, "last", MAX_TRACED_REQUESTS)
        if self._recorder is None:
            hint = "InferenceSession(bundle, trace=True)"
            raise UsageError("U084", "this session records no trace: it was opened without trace=True", hint=hint)
        timelines = self.list_timelines()[-count:]
        predicted = predict_timelines(self._bundle.manifest, timelines)
        return chrome_trace(timelines, predicted, self._bundle.manifest, read_segment_nodes(self._bundle))

    def list_timelines(self) -> tuple[RequestTimeline, ...]:
        """Return what the last requests did, at most 1000 that have succeeded, in the order of their submission.

        Needs `trace=True`; it is empty otherwise.
        """
        return self._recorder.list_timelines() if self._recorder else ()

    def list_copies(self) -> tuple[CopyStatus, ...]:
        """Return the copies of the bundle, `replicas` of them: which are open, and why one was left out.

        A session of one copy has none.

        >>> [copy.is_open for copy in session.list_copies()]  # doctest: +SKIP
        [True, False]
        """
        return self._session.list_copies()
