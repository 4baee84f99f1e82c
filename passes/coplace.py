"""Group nodes that must or should share a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from onnxplace.facts import Groups, Profile
from onnxplace.passes.placement.grouping.node_groups import group_nodes
from onnxplace.state import Pass, State


@dataclass(frozen=True)
class Coplace(Pass):
    """Group nodes that must or should share a device.

    Groups come from, in this order: carried states, the user's wishes, fused kernels, parameters, training and
    traffic. A carried state (`--state OUT=IN`) joins the producer of OUT with all readers of IN: its value stays on one
    device. From fused kernels on, only nodes are joined that the same devices take.

    In a training step in ONNX, `parameters=together` keeps the nodes of one parameter together: those that read it, or
    what follows from it alone, such as its transpose; and of the others those that compute its gradient, its moments
    and its new values and nothing else. Nodes that several parameters share, such as bias corrections or a norm of all
    gradients, do not connect them.

    `join` says when a node whose values have a single reader joins that reader (Baechi, SoCC 2020, section 4):
    `worth` if sending its values would take longer than computing the node, `always` as published, or `never`.

    `backward=follow` lets the forward part of a training step decide for all of it: each backward node joins the
    forward node it belongs to, and `join` considers only the rest, as if the step ended there. That node is the one
    whose value it reads, the latest in topological order of several. Where the graph's own group of the backward
    node has forward nodes, only those count, and the latest of them if it reads none of them. A backward node
    without either belongs where the nearest other backward node does, by the number of values between them in either
    direction. Of those at one distance, found breadth first from the first in topological order, the first one counts.
    Backward nodes that no such path connects to the forward part stay free. In ONNX, the largest forward value that a
    node reads decides, and nodes that work for one parameter, or read one, follow the first forward node that reads it;
    nodes that update parameters follow no other. Unlike Baechi's forward-only mode, which places the forward graph
    alone, backward time, stashed activations, gradients and optimiser state are scheduled and counted. Near-linear.

    Where sending a's value takes longer than computing a, d's value less than d, and b and c share a carried state:

        before   a -> b -> d -> c          after   groups {a, b, c} and {d}
    """

    name: ClassVar[str] = "coplace"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Groups,)

    join: Literal["worth", "always", "never"] = "worth"
    """When a node joins its only reader."""
    given: bool = True
    """Keep the graph's own groups together."""
    backward: Literal["free", "follow"] = "free"
    """Whether backward nodes join the forward node they belong to."""
    parameters: Literal["together", "free"] = "together"
    """Whether the nodes of one parameter of a training step stay together."""
    colocate: tuple[str, ...] = ()
    """Regular expressions; the nodes whose whole name, or else module, one matches share a device."""
    device_map: str = ""
    """A JSON file of regular expression -> device; the first that matches a node's name or module decides.

    Or a map of modules by accelerate or Olive, settings of ONNX Runtime, or a model whose nodes name their devices
    (docs/export.md)."""

    def run(self, state: State) -> State:
        groups, notes = group_nodes(state, **vars(self))
        return state.with_facts(groups).with_notes(*notes)
