"""A small model as PyTorch's exporter with `dynamo=True` writes it: modules are in metadata, names have numbers."""

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

LLAMA = "transformers.models.llama.modeling_llama"
KEYS = ("namespace", "pkg.torch.onnx.name_scopes")


def add_scopes(node: NodeProto, fx_name: str, *modules: str, keys: tuple[str, ...] = KEYS) -> NodeProto:
    """Add the metadata that torch 2.5 to 2.9 write: modules, outermost first, and the node of the FX graph."""
    paths = ["", *modules, fx_name]
    classes = [f"{LLAMA}.Llama{len(path)}" for path in paths[:-1]] + ["aten.linear.default"]
    values = {
        "namespace": "/".join(f"{path}: {kind}" for path, kind in zip(paths, classes)),
        "pkg.torch.onnx.class_hierarchy": repr(classes),
        "pkg.torch.onnx.fx_node": f"%{fx_name} : [num_users=1] = call_function[target=torch.ops.aten.linear.default]",
        "pkg.torch.onnx.name_scopes": repr(paths),
        "pkg.torch.onnx.stack_trace": 'File "modeling_llama.py", line 308, in forward\n    return self.up(x)',
    }
    for key, value in values.items():
        if key in keys or key not in KEYS:
            node.metadata_props.add(key=key, value=value)
    return node


def dynamo_model(keys: tuple[str, ...] = KEYS, layers: int = 2, size: int = 16) -> ModelProto:
    """Return layers of a product, an activation, a product and a sum, in `model.layers.N`, and a product in `lm_head`.

    Nodes are `node_linear`, `node_relu`, `node_linear_1`, `node_add` and so on, as the exporter numbers them.
    """
    random = np.random.default_rng(0)
    nodes, weights, value = [], [], "input"

    def add(operator: str, name: str, inputs: list[str], *modules: str) -> str:
        node = helper.make_node(operator, inputs, [name], name=f"node_{name}")
        nodes.append(add_scopes(node, name, *modules, keys=keys))
        return name

    def weight(name: str) -> str:
        weights.append(numpy_helper.from_array(random.normal(size=(size, size)).astype(np.float32), name))
        return name

    for number in range(layers):
        layer = f"model.layers.{number}"
        mlp, suffix = ("model", layer, f"{layer}.mlp"), f"_{number}" if number else ""
        inputs = [value, weight(f"{layer}.mlp.up.weight")]
        up = add("MatMul", f"linear_{2 * number}", inputs, *mlp, f"{layer}.mlp.up")
        act = add("Relu", f"relu{suffix}", [up], *mlp)
        inputs = [act, weight(f"{layer}.mlp.down.weight")]
        down = add("MatMul", f"linear_{2 * number + 1}", inputs, *mlp, f"{layer}.mlp.down")
        value = add("Add", f"add{suffix}", [value, down], "model", layer)
    logits = add("MatMul", "logits", [value, weight("lm_head.weight")], "lm_head")
    values = [helper.make_tensor_value_info(name, 1, ["batch", size]) for name in ("input", logits)]
    graph = helper.make_graph(nodes, "main_graph", values[:1], values[1:], weights)
    opsets = [helper.make_opsetid("", 18)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="pytorch")
