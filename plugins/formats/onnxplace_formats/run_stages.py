"""Run the stages of a model with ONNX Runtime and numpy: python run.py inputs.npz outputs.npz."""

import ctypes
import json
import math
import sys
import zipfile
from collections.abc import Iterator
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

FOLDER = Path(__file__).parent
# Types that numpy lacks, by ONNX's numbers (bfloat16, float8, int4 and others), with the bits of an element.
BITS = {16: 16, 17: 8, 18: 8, 19: 8, 20: 8, 21: 4, 22: 4, 23: 4, 24: 8, 25: 2, 26: 2}


def read_plan() -> Any:
    """Return what stages.json says."""
    return json.loads((FOLDER / "stages.json").read_text(encoding="utf-8"))


def open_stage(stage: dict[str, Any]) -> Any:
    """Open a session on the device of a stage."""
    options = ort.SessionOptions()
    if stage["keeps_order"]:  # a training step: its own order needs the least memory
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(FOLDER / stage["file"], options, providers=list(map(tuple, stage["providers"])))


def run_stage(session: Any, stage: dict[str, Any], values: dict[str, Any]) -> Any:
    """Return the outputs of a stage; all as OrtValues if numpy lacks the type of one."""
    feeds = {name: values[name] for name in stage["inputs"] if name in values}
    if stage["fits_numpy"]:
        return session.run(stage["outputs"], feeds)
    for name, value in feeds.items():
        if isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype.kind in "OU"):
            sys.exit(f"{stage['file']} returns types that numpy lacks: it cannot take {name!r}, a text or sequence")
        feeds[name] = value if isinstance(value, ort.OrtValue) else ort.OrtValue.ortvalue_from_numpy(value)
    return session.run_with_ort_values(stage["outputs"], feeds)


def run(plan: Any, sessions: list[Any], feeds: dict[str, Any]) -> dict[str, Any]:
    """Return the outputs of the model, among them its states; feed these to the next call."""
    values = dict(feeds)
    for session, stage in zip(sessions, plan["stages"]):
        values.update(zip(stage["outputs"], run_stage(session, stage, values)))
        for name in stage["frees"]:
            values.pop(name, None)
    return {output["name"]: values[output["value"]] for output in plan["outputs"]}


def read_inputs(plan: Any, path: str) -> dict[str, Any]:
    """Return the inputs in a file by name; those of a sequence are `name.0`, `name.1`, and none of an empty one."""
    feeds: dict[str, Any] = {}
    with np.load(path) as arrays:
        for name, kind, number in ((item["name"], item["type"], item["element"]) for item in plan["inputs"]):
            if name in arrays:
                feeds[name] = fit_input(arrays[name], kind, number)
            elif kind.startswith("seq("):
                names = takewhile(arrays.__contains__, (f"{name}.{index}" for index in count()))
                feeds[name] = [fit_input(arrays[element], kind, number) for element in names]
    return feeds


def fit_input(array: Any, kind: str, number: int) -> Any:
    """Return what ONNX Runtime takes: strings for bytes, an OrtValue for plain bytes of a type that numpy lacks."""
    if array.dtype.kind in "SV" and "string" in kind:
        return np.array([text.decode() for text in array.ravel().tolist()], object).reshape(array.shape)
    bits = BITS.get(number, 0)
    if not bits or array.dtype != np.dtype(f"V{max(bits // 8, 1)}"):
        return array
    value = ort.OrtValue.ortvalue_from_shape_and_type(array.shape, number)
    data = np.frombuffer(array.tobytes(), np.uint8)
    if bits < 8:  # the first element has the lowest bits
        parts = np.resize(data, (value.tensor_size_in_bytes(), 8 // bits)) & 2**bits - 1
        data = np.bitwise_or.reduce(parts << np.arange(0, 8, bits), axis=1).astype(np.uint8)
    ctypes.memmove(value.data_ptr(), data.tobytes(), len(data))
    return value


def list_arrays(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of an output: each element of a sequence is one, an empty optional is none."""
    if isinstance(value, ort.OrtValue):
        value = read_value(value) if value.has_value() else None
    if isinstance(value, list):
        for index, element in enumerate(value):
            yield from list_arrays(f"{name}.{index}", element)
    elif value is not None:
        array = np.asarray(value)
        yield name, array.astype(str) if array.dtype == object else array


def read_value(value: Any) -> Any:
    """Return an OrtValue as an array, in plain bytes if numpy lacks its type: one for each element of few bits."""
    if not (bits := BITS.get(value.element_type(), 0)):
        return value.numpy()
    data = np.frombuffer(ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes()), np.uint8)
    if bits < 8:
        data = (data[:, None] >> np.arange(0, 8, bits) & 2**bits - 1).astype("u1").ravel()[: math.prod(value.shape())]
    return data.view(f"V{max(bits // 8, 1)}").reshape(value.shape())


def write_outputs(path: str, outputs: dict[str, Any]) -> None:
    """Write outputs as `numpy.load` reads them, under any names, and without objects."""
    with zipfile.ZipFile(path, "w") as archive:
        for output, value in outputs.items():
            for name, array in list_arrays(output, value):
                if f"{name}.npy" in archive.namelist():
                    sys.exit(f"{path}: output {output!r} has the name of another array, {name!r}: import run instead")
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    stages = read_plan()
    opened = [open_stage(stage) for stage in stages["stages"]]
    write_outputs(sys.argv[2], run(stages, opened, read_inputs(stages, sys.argv[1])))
