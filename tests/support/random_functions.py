"""Random models whose local functions have attributes of all types except sparse tensors, with and without defaults.

Each attribute is used by operators whose result shows its value, directly or within If, Loop and Scan. Functions call
later ones, and pass their own attributes on, also those that they may not have been given.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    helper,
    numpy_helper,
)

SIZE = 3
"""All values are float32 of this many rows and columns."""
DOMAIN = "own"
PLAIN = 2
"""Depth from which on nodes are simple: no subgraphs, and no attributes of the function."""
Nodes = list[NodeProto]
_TYPES = {
    "axis": AttributeProto.INT,
    "whole": AttributeProto.INT,
    "alpha": AttributeProto.FLOAT,
    "approximate": AttributeProto.STRING,
    "perm": AttributeProto.INTS,
    "numbers": AttributeProto.FLOATS,
    "texts": AttributeProto.STRINGS,
    "weight": AttributeProto.TENSOR,
    "branch": AttributeProto.GRAPH,
    "kind": AttributeProto.TYPE_PROTO,
    "graphs": AttributeProto.GRAPHS,
    "tensors": AttributeProto.TENSORS,
    "kinds": AttributeProto.TYPE_PROTOS,
}
_UNUSED = ("graphs", "tensors", "kinds")
"""Types of which no operator has an attribute; functions pass them on."""
_OPTIONAL = ("axis", "alpha", "approximate", "perm", *_UNUSED)
"""Attributes that the operators which use them can do without."""


def draw_model(seed: int) -> ModelProto:
    """Return a model of one input, x, and one output, y."""
    return _Drawing(random.Random(seed)).draw_model()


class _Drawing:
    def __init__(self, source: random.Random) -> None:
        self.random = source
        self.branches = 0
        self.count = source.randint(1, 4)
        self.declared: dict[int, dict[str, AttributeProto | None]] = {}
        for index in reversed(range(self.count)):
            self.declared[index] = self._draw_declarations(index)

    def draw_model(self) -> ModelProto:
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1), helper.make_opsetid("ai.onnx.ml", 3)]
        functions = [self._draw_function(index, opsets) for index in range(self.count)]
        shape = [SIZE, SIZE]
        graph = helper.make_graph(
            self._draw_nodes(-1, "x", "y"),
            "main",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        )
        return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions)

    def _draw_declarations(self, index: int) -> dict[str, AttributeProto | None]:
        """Return the attributes of a function, with their defaults."""
        names = [name for name in _TYPES if self.random.random() < 0.4]
        return {name: None if self.random.random() < 0.3 else self._draw_attribute(name, index) for name in names}

    def _draw_function(self, index: int, opsets: Sequence[Any]) -> FunctionProto:
        declared = self.declared[index]
        return helper.make_function(
            DOMAIN,
            f"f{index}",
            ["x"],
            ["y"],
            self._draw_nodes(index, "x", "y"),
            opsets,
            [attribute for attribute, default in declared.items() if default is None],
            [default for default in declared.values() if default is not None],
        )

    def _draw_nodes(self, owner: int, source: str, result: str, depth: int = 0) -> Nodes:
        """Return nodes that compute a value of another; `owner` is the function, -1 for the main graph."""
        nodes: Nodes = []
        steps = self.random.randint(1, 4 if depth == 0 else 2)
        names = [source, *(self._name_value(result, step) for step in range(steps - 1)), result]
        for before, after in pairwise(names):
            nodes += self._draw_step(owner, before, after, depth)
        return nodes

    def _name_value(self, result: str, step: int) -> str:
        return f"{result}{step}" if self.random.random() < 0.7 else f"{result}__{step}"

    def _draw_step(self, owner: int, source: str, result: str, depth: int) -> Nodes:
        choices: list[Callable[[], Nodes]] = []
        if depth < PLAIN and owner + 1 < self.count:
            choices += [lambda: self._draw_call(owner, source, result, depth)] * 2
        if (
            depth < PLAIN
            and owner >= 0
            and (names := [name for name in self.declared[owner] if self._is_safe(owner, name)])
        ):
            choices += [lambda: self._draw_use(owner, self.random.choice(names), source, result)] * 3
        if depth < PLAIN:
            choices.append(lambda: self._draw_control_flow(owner, source, result, depth))
        choices.append(lambda: [helper.make_node("Sin", [source], [result])])
        return self.random.choice(choices)()

    def _is_safe(self, owner: int, name: str) -> bool:
        """Return whether an attribute can be used: it has a default, or its operator one."""
        return name not in _UNUSED and (name in _OPTIONAL or self.declared[owner][name] is not None)

    def _draw_call(self, owner: int, source: str, result: str, depth: int) -> Nodes:
        callee = self.random.randrange(owner + 1, self.count)
        node = helper.make_node(f"f{callee}", [source], [result], domain=DOMAIN)
        own = self.declared[owner] if owner >= 0 and depth < PLAIN else {}
        for attribute, default in self.declared[callee].items():
            chance = self.random.random()
            if attribute in own and chance < 0.4 and (own[attribute] is not None or self._is_safe(callee, attribute)):
                node.attribute.append(_make_reference(attribute, attribute))
            elif chance < 0.6 or (default is None and attribute not in _OPTIONAL):
                node.attribute.append(self._draw_attribute(attribute, callee))
        return [node]

    def _draw_use(self, owner: int, name: str, source: str, result: str) -> Nodes:
        """Return nodes whose result shows the value of an attribute."""
        reference = {
            "axis": lambda: _use("Softmax", [source], [result], axis=name),
            "alpha": lambda: _use("LeakyRelu", [source], [result], alpha=name),
            "approximate": lambda: _use("Gelu", [source], [result], approximate=name),
            "perm": lambda: _use("Transpose", [source], [result], perm=name),
        }
        if name in reference:
            return [reference[name]()]
        value = f"{result}_c"
        if name == "branch":
            other = _make_graph([helper.make_node("Cos", [source], [f"{result}_o"])], f"{result}_o")
            node = _use("If", [f"{result}_i"], [f"{value}"], then_branch="branch")
            node.attribute.append(helper.make_attribute("else_branch", other))
            chosen = helper.make_node("Constant", [], [f"{result}_i"], value=_make_tensor(np.array(True)))
            return [chosen, node, helper.make_node("Add", [source, value], [result])]
        if name == "kind":
            given = [_use("Optional", [], [f"{result}_o"], type=name)]
            given.append(helper.make_node("OptionalHasElement", [f"{result}_o"], [f"{result}_h"]))
            return [*given, *_add(f"{result}_h", source, result)]
        if name == "texts":
            constant = _use("Constant", [], [f"{result}_t"], value_strings=name)
            encoder = helper.make_node(
                "LabelEncoder",
                [f"{result}_t"],
                [value],
                domain="ai.onnx.ml",
                keys_strings=["a", "b", "c"],
                values_floats=[1.0, 2.0, 3.0],
            )
            return [constant, encoder, *_add(value, source, result)]
        field = {"whole": "value_int", "numbers": "value_floats", "weight": "value"}[name]
        return [_use("Constant", [], [value], **{field: name}), *_add(value, source, result)]

    def _draw_control_flow(self, owner: int, source: str, result: str, depth: int) -> Nodes:
        kind = self.random.choice(("If", "Loop", "Scan"))
        inner = f"{result}_{kind[0]}"
        if kind == "Scan":
            body = _make_graph(self._draw_rows(owner, inner), f"{inner}r")
            body.input.append(helper.make_tensor_value_info(f"{inner}e", TensorProto.FLOAT, [SIZE]))
            return [helper.make_node("Scan", [source], [result], body=body, num_scan_inputs=1)]
        flag, count = f"{inner}f", f"{inner}n"
        constants = [
            helper.make_node("Constant", [], [flag], value=_make_tensor(np.array(self.random.random() < 0.5))),
            helper.make_node("Constant", [], [count], value=_make_tensor(np.array(2))),
        ]
        if kind == "If":
            branches = [
                _make_graph(self._draw_nodes(owner, source, f"{inner}{side}", depth + 1), f"{inner}{side}")
                for side in "te"
            ]
            return [
                *constants,
                helper.make_node("If", [flag], [result], then_branch=branches[0], else_branch=branches[1]),
            ]
        nodes = [
            helper.make_node("Identity", [f"{inner}g"], [f"{inner}on"]),
            *self._draw_nodes(owner, f"{inner}v", f"{inner}w", depth + 1),
        ]
        body = _make_graph(nodes, f"{inner}on", f"{inner}w")
        body.output[0].type.tensor_type.elem_type = TensorProto.BOOL
        body.input.append(helper.make_tensor_value_info(f"{inner}i", TensorProto.INT64, []))
        body.input.append(helper.make_tensor_value_info(f"{inner}g", TensorProto.BOOL, []))
        body.input.append(helper.make_tensor_value_info(f"{inner}v", TensorProto.FLOAT, [SIZE, SIZE]))
        return [*constants, helper.make_node("Loop", [count, "", source], [result], body=body)]

    def _draw_rows(self, owner: int, inner: str) -> Nodes:
        """Return the body of a Scan, which computes a row."""
        if owner >= 0 and "alpha" in self.declared[owner]:
            return [_use("LeakyRelu", [f"{inner}e"], [f"{inner}r"], alpha="alpha")]
        return [helper.make_node("Neg", [f"{inner}e"], [f"{inner}r"])]

    def _draw_attribute(self, name: str, owner: int) -> AttributeProto:
        """Return a value for an attribute; graphs may call functions after `owner`."""
        draw = self.random
        values: dict[str, Callable[[], Any]] = {
            "axis": lambda: draw.choice((0, 1)),
            "whole": lambda: draw.randint(-5, 5),
            "alpha": lambda: draw.choice((0.1, 0.7, -2.0)),
            "approximate": lambda: draw.choice(("none", "tanh")),
            "perm": lambda: draw.choice(([0, 1], [1, 0])),
            "numbers": lambda: [float(draw.randint(1, 9)) for _ in range(SIZE)],
            "texts": lambda: [draw.choice("abc") for _ in range(SIZE)],
            "weight": lambda: self._draw_tensor(),
            "branch": lambda: self._draw_branch(owner),
            "kind": lambda: helper.make_tensor_type_proto(TensorProto.FLOAT, [SIZE]),
            "graphs": lambda: [self._draw_branch(owner)],
            "tensors": lambda: [self._draw_tensor()],
            "kinds": lambda: [helper.make_tensor_type_proto(TensorProto.FLOAT, [SIZE])],
        }
        return helper.make_attribute(name, values[name](), attr_type=_TYPES[name])

    def _draw_tensor(self) -> TensorProto:
        return _make_tensor(np.array([self.random.randint(-9, 9) for _ in range(SIZE)], np.float32))

    def _draw_branch(self, owner: int) -> GraphProto:
        """Return a graph without inputs, which computes a value of its own constant."""
        self.branches += 1
        value, result = f"b{self.branches}_x", f"b{self.branches}_y"
        source = helper.make_node("Constant", [], [value], value=self._draw_matrix())
        return _make_graph([source, *self._draw_nodes(owner, value, result, PLAIN)], result)

    def _draw_matrix(self) -> TensorProto:
        numbers = [self.random.randint(-9, 9) for _ in range(SIZE * SIZE)]
        return _make_tensor(np.array(numbers, np.float32).reshape(SIZE, SIZE))


def _add(value: str, source: str, result: str) -> Nodes:
    """Return nodes that add a value of any type to a float."""
    cast = helper.make_node("Cast", [value], [f"{result}_f"], to=TensorProto.FLOAT)
    return [cast, helper.make_node("Add", [source, f"{result}_f"], [result])]


def _use(operator: str, inputs: Sequence[str], outputs: Sequence[str], **references: str) -> NodeProto:
    """Return a node whose attributes are those of its function."""
    node = helper.make_node(operator, inputs, outputs)
    for attribute, name in references.items():
        node.attribute.append(_make_reference(attribute, name))
    return node


def _make_reference(attribute: str, name: str) -> AttributeProto:
    return AttributeProto(name=attribute, ref_attr_name=name, type=_TYPES[name])


def _make_tensor(array: Any) -> TensorProto:
    return numpy_helper.from_array(array)


def _make_graph(nodes: Nodes, *outputs: str, name: str = "body") -> GraphProto:
    values = [helper.make_tensor_value_info(output, TensorProto.FLOAT, None) for output in outputs]
    return helper.make_graph(nodes, name, [], values)
