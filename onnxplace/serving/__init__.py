"""Serve many requests: streams, joining requests into batches, and copies of a bundle behind one session."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.serving.batched_session import (
        BatchedSession as BatchedSession,
        open_serving_session as open_serving_session,
    )
    from onnxplace.serving.copies import CopyOpener as CopyOpener
    from onnxplace.serving.options import (
        Batching as Batching,
        check_in_flight as check_in_flight,
        check_timeout as check_timeout,
        require_batching as require_batching,
    )
    from onnxplace.serving.replicated_session import ReplicatedSession as ReplicatedSession
    from onnxplace.serving.session_state import SessionState as SessionState
    from onnxplace.serving.streams import stream_results as stream_results

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "batched_session": "BatchedSession open_serving_session",
        "copies": "CopyOpener",
        "options": "Batching check_in_flight check_timeout require_batching",
        "replicated_session": "ReplicatedSession",
        "session_state": "SessionState",
        "streams": "stream_results",
    },
)
