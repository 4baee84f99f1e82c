"""Open a model in one session of ONNX Runtime (1.26 or later), and count the nodes of providers: python session.py."""

import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import onnxruntime

FOLDER = Path(__file__).resolve().parent
FIRST_VERSION = 1, 26
"""Of ONNX Runtime, which has layers from there on: earlier ones ignore them without a word."""


def read_settings(folder: Path = FOLDER) -> dict[str, Any]:
    """Return the providers, and entries of the session's configuration."""
    return dict(json.loads((folder / "session_options.json").read_text(encoding="utf-8")))


def make_options(settings: dict[str, Any]) -> onnxruntime.SessionOptions:
    """Return options with the assignment of layers; the assignment that follows is recorded."""
    if tuple(map(int, onnxruntime.__version__.split(".")[:2])) < FIRST_VERSION:
        message = f"ONNX Runtime {onnxruntime.__version__} knows no layers: install 1.26 or later"
        raise RuntimeError(message)
    options = onnxruntime.SessionOptions()
    for library in settings.get("custom_op_libraries", ()):
        options.register_custom_ops_library(library)
    for key, value in settings.items():
        if key.startswith("session."):
            options.add_session_config_entry(key, value)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.intra_op_num_threads = settings.get("intra_op_num_threads", 0)
    if settings.get("keeps_order"):  # a training step: its own order needs the least memory
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def find_devices(provider: dict[str, Any]) -> list[Any]:
    """Return the device of a provider, in a list; the provider is loaded if it is a package.

    Raises RuntimeError if the package or the device is not here.
    """
    known = {device.ep_name for device in onnxruntime.get_ep_devices()}
    if provider["name"] not in known and "module" in provider:
        try:
            path = importlib.import_module(provider["module"]).get_library_path()
        except ModuleNotFoundError as error:
            message = f"{provider['name']} is not installed: pip install {provider['module'].replace('_', '-')}"
            raise RuntimeError(message) from error
        onnxruntime.register_execution_provider_library(provider["library"], path)
    new = [device for device in onnxruntime.get_ep_devices() if device.ep_name not in known - {provider["name"]}]
    own = [device for device in new if device.ep_name == new[0].ep_name]
    of_type = [device for device in own if device.device.type.name == provider.get("type")]
    index = provider.get("index", 0)
    found = (of_type or own)[index : index + 1]
    if not found:
        message = f"{provider['name']} has no device {index} here: it lists {len(of_type or own)}"
        raise RuntimeError(message)
    if not of_type and "type" in provider:
        kind = found[0].device.type.name
        sys.stderr.write(f"{provider['name']} has no {provider['type']} here: its {kind} computes instead\n")
    return found


def open_session(folder: Path = FOLDER) -> onnxruntime.InferenceSession:
    """Return a session whose nodes are on the providers that the settings name."""
    settings = read_settings(folder)
    options, providers = make_options(settings), settings["providers"]
    if not any("module" in provider for provider in providers):
        listed = [(provider["name"], provider["options"]) for provider in providers]
        return onnxruntime.InferenceSession(folder / "model.onnx", options, providers=listed)
    # Providers that come as packages are given by their devices, and so are the others of such a session.
    for provider in providers:
        options.add_provider_for_devices(find_devices(provider), provider["options"])
    return onnxruntime.InferenceSession(folder / "model.onnx", options)


def count_nodes(session: onnxruntime.InferenceSession) -> Counter[str]:
    """Return how many nodes each provider has, after ONNX Runtime's own optimisations."""
    groups = session.get_provider_graph_assignment_info()
    return Counter(group.ep_name for group in groups for _ in group.get_nodes())


if __name__ == "__main__":
    for name, count in count_nodes(open_session()).items():
        sys.stdout.write(f"{count:6} {name}\n")
