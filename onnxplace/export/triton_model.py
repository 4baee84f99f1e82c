"""A model of Triton's Python backend: it runs the bundle next to it with onnxplace.

The server is Triton 24.11 or later, with onnxplace in its Python: pip install 'onnxplace[gpu]'.
"""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

BUNDLE_FOLDER = "model.bundle"


class TritonPythonModel:
    """Triton calls `initialize` once, `execute` with requests, and `finalize` at the end."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the bundle."""
        import onnxplace

        config = json.loads(args["model_config"])
        parameters = {key: entry.get("string_value", "") for key, entry in config.get("parameters", {}).items()}
        libraries = [path for path in parameters.get("custom_op_libraries", "").split(",") if path]
        max_batch = int(config.get("max_batch_size", 0))
        batching = onnxplace.Batching(max_batch=max_batch) if max_batch else None
        bundle = onnxplace.load(Path(__file__).parent / BUNDLE_FOLDER)
        self.session = onnxplace.InferenceSession(bundle, custom_op_libraries=libraries, batching=batching)
        self.inputs = {item.name: item for item in bundle.manifest.inputs}
        self.carries_states = bool(bundle.manifest.states)
        self.output_names = [item.name for item in self.session.get_outputs()]
        self.max_sequences = int(parameters.get("max_sequences", "64"))
        self.conversations: OrderedDict[Any, Any] = OrderedDict()

    def execute(self, requests: list[Any]) -> None:
        """Start all requests; they overlap, also with those of later calls, except within a sequence."""
        for request in requests:
            self.start(request)

    def finalize(self) -> None:
        """End all threads, after the requests in flight."""
        self.session.close()

    def start(self, request: Any) -> None:
        """Start a request; another thread sends its response."""
        sender, requested = request.get_response_sender(), set(request.requested_output_names())
        names = [name for name in self.output_names if name in requested]
        try:
            feeds = self.read_feeds(request)
            self.choose_session(request).run_async(
                names, feeds, lambda outputs, error: send_response(sender, names, outputs, error)
            )
        except Exception as error:  # noqa: BLE001 - each request answers for itself
            send_response(sender, names, None, error)

    def read_feeds(self, request: Any) -> dict[str, Any]:
        """Return copies of the inputs of a request; a scalar has the shape [1] in Triton, and text is bytes."""
        feeds = {}
        for tensor in request.inputs():
            array = np.array(tensor.as_numpy())  # the memory of a request ends when `execute` returns
            if self.inputs[tensor.name()].shape == ():
                array = array.reshape(())
            if array.dtype == object:
                texts = [item.decode() if isinstance(item, bytes) else item for item in array.ravel()]
                array = np.array(texts, dtype=object).reshape(array.shape)
            feeds[tensor.name()] = array
        return feeds

    def choose_session(self, request: Any) -> Any:
        """Return the conversation of the request's sequence, or the session of a model without states."""
        import triton_python_backend_utils as pb_utils

        if not self.carries_states:
            return self.session
        key, flags = request.correlation_id(), request.flags()
        if flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.conversations.pop(key, None)
            while len(self.conversations) >= self.max_sequences:  # sequences that Triton ended for idleness
                self.conversations.popitem(last=False)
            self.conversations[key] = self.session.conversation()
        if key not in self.conversations:
            raise ValueError(f"sequence {key!r} has not started, or was idle for too long: send sequence_start")
        self.conversations.move_to_end(key)
        if flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
            return self.conversations.pop(key)
        return self.conversations[key]


def send_response(sender: Any, names: list[str], outputs: Any, error: BaseException | None) -> None:
    """Send the outputs of a request, or why it failed."""
    import triton_python_backend_utils as pb_utils

    try:
        if error is not None:
            raise error
        response = pb_utils.InferenceResponse([pb_utils.Tensor(*pair) for pair in zip(names, map(to_tensor, outputs))])
    except Exception as failure:  # noqa: BLE001 - the client has to know
        response = pb_utils.InferenceResponse([], pb_utils.TritonError(f"{type(failure).__name__}: {failure}"))
    sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def to_tensor(output: Any) -> Any:
    """Return an output as Triton takes it: a scalar with the shape [1]."""
    array = np.asarray(output)
    return array.reshape(array.shape or (1,))
