"""The modules that nodes come from, in the metadata of PyTorch's exporter and in names."""

import pytest
from onnx import NodeProto

from onnxplace.model import find_module_path, list_module_paths

# As torch 2.9 writes it.
NAMESPACE = (
    ": transformers.models.llama.modeling_llama.LlamaForCausalLM/model: transformers.models.llama.modeling_llama."
    "LlamaModel/model.layers.0: transformers.models.llama.modeling_llama.LlamaDecoderLayer/model.layers.0.mlp: "
    "transformers.models.llama.modeling_llama.LlamaMLP/linear_4: aten.linear.default"
)
SCOPES = "['', 'model', 'model.layers.0', 'model.layers.0.mlp', 'linear_4']"


def node_of(name: str, **metadata: str) -> NodeProto:
    node = NodeProto(name=name)
    for key, value in metadata.items():
        node.metadata_props.add(key=key.replace("__", "."), value=value)
    return node


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"namespace": NAMESPACE}, "model.layers.0.mlp"),
        ({"pkg__torch__onnx__name_scopes": SCOPES}, "model.layers.0.mlp"),
        (
            {"namespace": ": a.Net/other: a.B/x: aten.add.Tensor", "pkg__torch__onnx__name_scopes": SCOPES},
            "model.layers.0.mlp",
        ),
        ({"namespace": ": a.Net/add_3: aten.add.Tensor"}, ""),
        ({"pkg__torch__onnx__name_scopes": "['', 'add_3']"}, ""),
        ({"namespace": "anything else", "pkg__torch__onnx__name_scopes": "["}, ""),
        ({"namespace": "", "pkg__torch__onnx__name_scopes": "[]"}, ""),
        ({}, ""),
    ],
)
def test_the_module_of_a_node_comes_from_the_metadata_of_pytorchs_exporter(metadata, expected):
    assert find_module_path(node_of("node_MatMul_12", **metadata)) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("/model/norm/Mul", "model.norm"),
        ("encoder/layer_0/MatMul", "encoder.layer_0"),
        ("a.b", "a"),
        ("", ""),
        ("/", ""),
    ],
)
def test_without_metadata_the_module_comes_from_the_name(name, expected):
    assert find_module_path(node_of(name)) == expected


def test_modules_around_a_node_include_containers_that_run_nothing_themselves():
    node = node_of("node_MatMul_12", pkg__torch__onnx__name_scopes=SCOPES)
    modules = ["model.layers.0.mlp", "model.layers.0", "model.layers", "model", ""]
    assert list(list_module_paths(node)) == ["node_MatMul_12", *modules], "linear_4 is no module"
