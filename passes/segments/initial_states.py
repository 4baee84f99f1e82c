"""Initial values of carried states: the defaults of their inputs, written once and read by no segment."""

from __future__ import annotations

from onnxplace.bundle import SEGMENTS_FOLDER, WEIGHTS_FILE, InitialRecord
from onnxplace.model import Model, WeightFile


def store_initial_states(model: Model, weights: WeightFile) -> dict[str, InitialRecord]:
    """Write the default values of state inputs; return where each is, by input.

    In a segment they would be weights: a second copy, in memory for as long as its session is open. States of types
    without plain bytes, such as strings, stay there.
    """
    records = {}
    for name in model.states:
        if not model.overridable(name) or (stored := weights.store(model.initializers[name], model.folder)) is None:
            continue
        records[name] = InitialRecord(
            file=stored.location if stored.is_linked else f"{SEGMENTS_FOLDER}/{WEIGHTS_FILE}",
            linked=stored.is_linked,
            offset=stored.offset,
            bytes=stored.size,
            shape=tuple(model.initializers[name].dims),
        )
    return records
