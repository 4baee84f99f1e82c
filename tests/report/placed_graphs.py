"""Cost graphs with random placements, for tests of reports."""

import numpy as np

from onnxplace.cost_graph.data import CostGraph
from onnxplace.cost_graph.part_functions import GENERATORS
from onnxplace.driver.place import replace_devices
from onnxplace.reports.step_analysis import PlacedStep
from onnxplace.simulation.simulator import simulate
from tests.support.reference_simulator import share_at_random


def draw_graph(nodes: int, seed: int, devices: int = 3, kind: str = "layered") -> CostGraph:
    """Return a generated cost graph with enough memory."""
    return replace_devices(GENERATORS[kind](nodes, seed=seed), devices, 1 << 40)


def place_at_random(graph: CostGraph, seed: int, *, shared: bool = False) -> PlacedStep:
    """Return a step of a cost graph with its nodes on random devices, which may share processors."""
    operators, target, random = graph.profile.graph, graph.target, np.random.default_rng(seed)
    device = random.integers(0, len(target.devices), len(operators)).astype(np.int32)
    target = share_at_random(target, random) if shared else target
    seconds = np.stack([graph.profile.seconds[item.cost_class] for item in target.devices])
    return PlacedStep(
        graph=operators,
        seconds=seconds,
        target=target,
        device_names=tuple(str(name) for name in graph.device_ids),
        device=device,
        order=operators.order,
        simulation=simulate(operators, seconds, target, device, operators.order),
        details=operators.ops,
    )
