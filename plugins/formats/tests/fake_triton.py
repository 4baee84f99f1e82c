"""A small Triton: its rules for model repositories, its ensembles, and the module that its Python backend offers."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from google.protobuf import json_format, text_format

from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options

FLAG_START, FLAG_END, FLAG_FINAL = 1, 2, 1


def import_file(name: str, path: Path) -> Any:
    """Import a file as a module of this name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_protobufs() -> Any:
    """Return Triton's published message types, from the wheel of its client, which needs gRPC for everything else."""
    if "model_config_pb2" in sys.modules:
        return sys.modules["model_config_pb2"]
    spec = importlib.util.find_spec("tritonclient")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    sys.modules["model_config_pb2"] = import_file("model_config_pb2", path)
    return sys.modules["model_config_pb2"]


def read_config(folder: Path) -> Any:
    """Return the configuration of a model; fails at fields that Triton does not have."""
    config = text_format.Parse((folder / "config.pbtxt").read_text(), load_protobufs().ModelConfig())
    assert config.name == folder.name
    assert (folder / "1").is_dir()
    assert all(size > 0 or size == -1 for item in (*config.input, *config.output) for size in item.dims)
    for item in (*config.input, *config.output):
        assert len(item.dims) >= 1
        assert config.max_batch_size or not item.HasField("reshape"), (
            "Triton refuses scalars in a model without batches"
        )
    return config


class Ensemble:
    """An ensemble, checked as Triton checks it (src/ensemble_scheduler of its core), with one session for each step."""

    def __init__(self, repository: Path, name: str) -> None:
        self.config = read_config(repository / name)
        assert self.config.platform == "ensemble"
        assert self.config.max_batch_size == 0
        self.steps = list(self.config.ensemble_scheduling.step)
        assert {step.model_name for step in self.steps} | {name} == {
            item.name for item in repository.iterdir() if item.is_dir()
        }
        self.models = {step.model_name: read_config(repository / step.model_name) for step in self.steps}
        kinds = {item.name: (item.data_type, tuple(item.dims)) for item in (*self.config.input, *self.config.output)}
        produced = [item.name for item in self.config.input]
        for step in self.steps:
            model = self.models[step.model_name]
            assert model.backend == "onnxruntime"
            assert set(step.input_map) == {item.name for item in model.input}
            assert set(step.output_map) == {item.name for item in model.output}
            produced += step.output_map.values()
            for item, tensor in [(i, step.input_map[i.name]) for i in model.input] + [
                (i, step.output_map[i.name]) for i in model.output
            ]:
                kind = kinds.setdefault(tensor, (item.data_type, tuple(item.dims)))
                assert kind[0] == item.data_type
                assert len(kind[1]) == len(item.dims)
                assert all(-1 in sizes or len(set(sizes)) == 1 for sizes in zip(kind[1], item.dims))
        assert len(set(produced)) == len(produced)
        # As Triton's ONNX Runtime backend, which makes a scalar of the shape [1] where the file has one.
        self.sessions = {
            model: open_session(repository / model / "1" / config.default_model_filename, make_session_options([0]))
            for model, config in self.models.items()
        }

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs by name; a step runs as soon as its inputs are there, whatever the order of the steps."""
        tensors = {
            item.name: np.reshape(feeds[item.name], np.shape(feeds[item.name]) or (1,)) for item in self.config.input
        }
        waiting = list(reversed(self.steps))
        while waiting:
            ready = [step for step in waiting if set(step.input_map.values()) <= set(tensors)]
            assert ready, "no step is ready"
            for step in ready:
                waiting.remove(step)
                session = self.sessions[step.model_name]
                scalars = {item.name for item in session.get_inputs() if item.shape == []}
                inputs = {
                    name: tensors[tensor].reshape(()) if name in scalars else tensors[tensor]
                    for name, tensor in step.input_map.items()
                }
                names = list(step.output_map)
                for name, output in zip(names, session.run(names, inputs)):
                    tensors[step.output_map[name]] = np.reshape(output, np.shape(output) or (1,))
        return {item.name: tensors[item.name] for item in self.config.output}


# ------------------------------------------------------------------------------------------------------- Python backend


class Tensor:
    """A tensor of the Python backend: numpy's types only, and text as bytes."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        assert isinstance(array, np.ndarray)
        assert array.ndim >= 1
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class Request(SimpleNamespace):
    """A request, as the Python backend gives it to a model."""

    def inputs(self) -> list[Tensor]:
        return [Tensor(name, np.atleast_1d(array)) for name, array in self.feeds.items()]

    def requested_output_names(self) -> Sequence[str]:
        return list(self.outputs)

    def get_response_sender(self) -> Request:
        return self

    def send(self, response: Any, flags: int) -> None:
        assert flags == FLAG_FINAL
        self.response.set_result(response)

    def correlation_id(self) -> int:
        return self.sequence

    def flags(self) -> int:
        return self.state


class PythonModel:
    """A model of the Python backend in this process."""

    def __init__(self, folder: Path, monkeypatch: Any) -> None:
        self.config = read_config(folder)
        assert self.config.backend == "python"
        utilities = ModuleType("triton_python_backend_utils")
        utilities.Tensor = Tensor
        utilities.InferenceResponse = lambda output_tensors=(), error=None: SimpleNamespace(
            outputs={tensor.name(): tensor.as_numpy() for tensor in output_tensors}, error=error
        )
        utilities.TritonError = str
        utilities.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = FLAG_START
        utilities.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = FLAG_END
        utilities.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FLAG_FINAL
        monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utilities)
        self.model = import_file("triton_model_under_test", folder / "1" / "model.py").TritonPythonModel()
        fields = json_format.MessageToDict(self.config, preserving_proto_field_name=True)
        self.model.initialize({"model_config": json.dumps(fields)})

    def request(
        self, feeds: Mapping[str, Any], outputs: Sequence[str] = (), sequence: int = 0, flags: int = 0
    ) -> Request:
        names = outputs or [item.name for item in self.config.output]
        return Request(feeds=feeds, outputs=names, sequence=sequence, state=flags, response=Future())

    def execute(self, *requests: Request) -> list[Any]:
        assert self.model.execute(list(requests)) is None
        return [request.response.result(timeout=60) for request in requests]

    def run(self, feeds: Mapping[str, Any], **options: Any) -> Any:
        (response,) = self.execute(self.request(feeds, **options))
        assert response.error is None, response.error
        return response.outputs
