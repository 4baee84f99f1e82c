"""Predict what the bundle will take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onnxplace.facts import Placement, Prediction, Profile, Schedule, Segments
from onnxplace.passes.segments.segment_predictions import predict_bundle
from onnxplace.state import Pass, State


@dataclass(frozen=True)
class Predict(Pass):
    """Predict the times and the memory that the manifest states: of a request, of segments, and of devices.

    They follow from the simulated step and the costs of nodes. With routes, requests in flight divide among them.
    `emit` predicts them itself where a pipeline does not have this pass.
    """

    name: ClassVar[str] = "predict"
    requires: ClassVar[tuple[type, ...]] = (Profile, Placement, Schedule, Segments)
    provides: ClassVar[tuple[type, ...]] = (Prediction,)

    def run(self, state: State) -> State:
        return state.with_facts(predict_bundle(state))
