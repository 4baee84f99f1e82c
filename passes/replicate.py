"""Let requests take several routes over copies of the segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxplace.errors import InfeasibleError, UsageError
from onnxplace.facts import Placement, Profile, Routes, Segments
from onnxplace.graph.op_graph import Ints
from onnxplace.passes.segments.segment_predictions import predict_devices, predict_routes
from onnxplace.problem import describe_shortage, require_taken
from onnxplace.state import Pass, State


@dataclass(frozen=True)
class Replicate(Pass):
    """Copy the model, a pipeline, or single stages to further devices, for many requests in flight.

    Each route names the devices that take the place of those with segments. Segments are shared: a device opens those
    of its routes. The shares of the routes give the most requests per second by a linear program: devices may be
    unlike, and may be on several routes.

    Raises:
        UsageError: a route does not name a device of the target for each device with segments.
        InfeasibleError: a copy does not fit into the memory of its device, or has a node that the device refuses.
    """

    name: ClassVar[str] = "replicate"
    requires: ClassVar[tuple[type, ...]] = (Profile, Placement, Segments)
    provides: ClassVar[tuple[type, ...]] = (Routes,)

    routes: tuple[str, ...] = ()
    """Further routes, as in `cpu:2+cpu:3`: devices that take the place of the used ones, in the order of the target."""

    def run(self, state: State) -> State:
        used = [index for index, program in enumerate(state[Segments].programs) if program]
        taken = {tuple(used)}
        device_maps = []
        for text in self.routes:
            stand_ins = self._parse_route(state, text, used)
            if tuple(stand_ins) in taken:
                raise self._make_error(text, "it is there already")
            taken.add(tuple(stand_ins))
            device_map: Ints = np.full(len(state.target.devices), -1, dtype=np.int32)
            device_map[used] = stand_ins
            require_taken(state, device_map[state[Placement].device], self.name)
            device_maps.append(device_map)
        after = state.with_facts(predict_routes(state, device_maps))
        peak_bytes = np.array([device.peak_bytes for device in predict_devices(after)])
        # Devices of a pool work on requests of their own: all of them may hold most at one time.
        pools = [peak_bytes[state.target.pool_of == index].sum() for index in range(len(state.target.pools))]
        held = np.array(pools, dtype=np.int64) if self.routes else state[Segments].simulation.pool_peak_bytes
        if shortage := describe_shortage(state.target, peak_bytes, held):
            hint = "name devices with more memory, raise --max-memory, or use fewer copies"
            raise InfeasibleError("P001", f"its copies do not fit: {shortage}", where=self.name, hint=hint)
        return after

    def _parse_route(self, state: State, text: str, used: list[int]) -> list[int]:
        """Return the devices that take the place of the used ones."""
        names = text.split("+") if text else []
        stand_ins = [state.target.position(name) for name in names]
        if len(names) != len(used):
            ids = " and ".join(state.target.devices[index].id for index in used)
            raise self._make_error(text, f"expected {len(used)} devices, in place of {ids}, got {len(names)}")
        if len(set(names)) < len(names):
            raise self._make_error(text, "it names a device twice")
        return stand_ins

    def _make_error(self, text: str, problem: str) -> UsageError:
        hint = "write replicate{routes=cpu:2+cpu:3;cpu:4+cpu:5}: a device for each one with segments"
        return UsageError("U075", f"route {text!r} cannot be taken: {problem}", where=f"pass {self.name!r}", hint=hint)
