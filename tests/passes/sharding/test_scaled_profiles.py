"""Which steps of exchanges share a kernel with the nodes next to them, whatever they read."""

from types import SimpleNamespace

from onnx import helper

from onnxplace.model.model import Model
from onnxplace.passes.sharding.apply.derived_facts import _find_partners
from onnxplace.passes.sharding.apply.exchanges import NodeOrigin


def find_partners(*nodes):
    """Return the partners of nodes, given as operator, inputs, outputs, device and source."""
    protos = [helper.make_node(op, inputs, outputs) for op, inputs, outputs, *_ in nodes]
    model = SimpleNamespace(nodes=protos, reads=[[name for name in node.input if name] for node in protos])
    model.readers = Model.readers.func(model)
    origins = [NodeOrigin(device, source) for *_, device, source in nodes]
    return _find_partners(SimpleNamespace(model=model, origins=origins))


READER = ("Add", ["t", "t"], ["y"], 1, 3)


def test_a_slice_that_is_sent_stays_with_the_node_that_makes_the_value():
    assert find_partners(("Relu", ["x"], ["v"], 0, 0), ("Slice", ["v", "a", "b"], ["t"], 0, -1), READER) == [(1, 0)]


def test_a_step_without_inputs_has_no_partner():
    assert find_partners(("RandomNormal", [], ["t"], 0, -1), READER) == []


def test_a_step_whose_first_input_is_omitted_is_no_partner_of_a_node_with_an_omitted_output():
    recurrent = ("GRU", ["x", "w", "r"], ["", "h"], 0, 0)
    assert find_partners(recurrent, ("Slice", ["", "a", "b"], ["t"], 0, -1), READER) == []
