"""Keep nodes off devices on which they are too inexact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Gt

from onnxplace.errors import Diagnostic, InfeasibleError
from onnxplace.facts import REFUSED_SECONDS, Profile, is_refused
from onnxplace.graph.op_graph import Floats
from onnxplace.machine.hardware import require_device
from onnxplace.model.lineage import RANDOM_OPERATORS
from onnxplace.model.model import Model
from onnxplace.passes.profiling.node_errors import choose_refused, measure_errors
from onnxplace.state import Pass, State


@dataclass(frozen=True)
class LimitErrors(Pass):
    """Keep nodes off devices on which they are too inexact.

    Each class of devices other than CPUs runs the nodes once, kernel by kernel, with the CPU's exact inputs. The error
    of a node is the largest difference from the CPU's results, over their largest magnitude. The device gets those
    nodes that save most time for their error, as long as all together stay within the maximum: the root of the sum of
    their squares does. It refuses the others. `compile --max-error` then compares the bundle as a whole.

    Raises:
        InfeasibleError: a node is too inexact on every device.
        TargetError: a device is not on this machine.
    """

    name: ClassVar[str] = "limit-errors"
    requires: ClassVar[tuple[type, ...]] = (Model, Profile)
    provides: ClassVar[tuple[type, ...]] = (Profile,)

    maximum: Annotated[float, Gt(0)] = 1e-3
    """The largest error of all nodes together, relative to the largest magnitude of each value."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the random inputs, where the user gave none."""

    def run(self, state: State) -> State:
        profile = state[Profile]
        errors = profile.errors or self._measure(state)
        seconds = {device.cost_class: profile.seconds[device.cost_class] for device in state.target.devices}
        refused = choose_refused(seconds, errors, profile.unit, self.maximum)
        seconds |= {name: np.where(nodes, REFUSED_SECONDS, seconds[name]) for name, nodes in refused.items()}
        if (homeless := is_refused(np.min(list(seconds.values()), axis=0))).any():
            message = f"the error of node {profile.graph.names[homeless.argmax()]!r} is too large on every device"
            hint = "add cpu:0 to the devices, or allow more"
            raise InfeasibleError("P065", message, where="--max-error", hint=hint)
        message = "{} of {} nodes stay elsewhere, to keep the error within {:g}"
        notes = [
            Diagnostic("C008", message.format(nodes.sum(), len(nodes), self.maximum), where=name)
            for name, nodes in refused.items()
            if nodes.any()
        ]
        costs = MappingProxyType({**profile.seconds, **seconds})
        return state.with_facts(replace(profile, seconds=costs, errors=errors)).with_notes(*notes)

    def _measure(self, state: State) -> Mapping[str, Floats]:
        """Return the errors of nodes on each class of devices except CPUs."""
        model, profile, errors = state[Model], state[Profile], {}
        is_random = np.isin([node.op_type for node in model.nodes], list(RANDOM_OPERATORS))
        for name, device in {item.cost_class: item for item in state.target.devices if item.kind != "cpu"}.items():
            require_device(device)
            group = np.where(is_random | is_refused(profile.seconds[name]), -1, profile.unit)
            errors[name] = measure_errors(model, profile.graph, model.feeds(self.seed), device.address, group)
        return MappingProxyType(errors)
