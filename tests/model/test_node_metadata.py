"""The modules that nodes come from, in the metadata of PyTorch's exporter and in names, and patterns of both."""

import re

import pytest
from hypothesis import given, strategies as st
from onnx import NodeProto

from onnxplace.model.loading import load
from onnxplace.model.node_metadata import find_module_path, list_aliases, match_nodes, suggest_nodes
from tests.support.dynamo_models import KEYS, dynamo_model

# As torch 2.9 writes it.
NAMESPACE = (
    ": transformers.models.llama.modeling_llama.LlamaForCausalLM/model: transformers.models.llama.modeling_llama."
    "LlamaModel/model.layers.0: transformers.models.llama.modeling_llama.LlamaDecoderLayer/model.layers.0.mlp: "
    "transformers.models.llama.modeling_llama.LlamaMLP/linear_4: aten.linear.default"
)
SCOPES = "['', 'model', 'model.layers.0', 'model.layers.0.mlp', 'linear_4']"
OTHER = ": a.Net/other: a.B/x: aten.add.Tensor"
NAMES = [
    "model.layers.0.mlp.up/node_linear_0",
    "model.layers.0.mlp/node_relu",
    "model.layers.0.mlp.down/node_linear_1",
    "model.layers.0/node_add",
    "lm_head/node_logits",
]


def node_of(name: str, namespace: str = "", scopes: str = "") -> NodeProto:
    node = NodeProto(name=name)
    for key, value in zip(KEYS, (namespace, scopes)):
        if value:
            node.metadata_props.add(key=key, value=value)
    return node


@pytest.mark.parametrize(
    ("namespace", "scopes", "expected"),
    [
        (NAMESPACE, "", "model.layers.0.mlp"),
        ("", SCOPES, "model.layers.0.mlp"),
        (OTHER, SCOPES, "model.layers.0.mlp"),
        (": a.Net/add_3: aten.add.Tensor", "", ""),
        ("", "['', 'add_3']", ""),
        ("anything else", "[", ""),
        ("", "[]", ""),
        ("", "", ""),
    ],
)
def test_the_module_of_a_node_comes_from_the_metadata_of_pytorchs_exporter(namespace, scopes, expected):
    assert find_module_path(node_of("node_MatMul_12", namespace, scopes)) == expected


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


def test_metadata_that_is_not_text_says_nothing():
    node = node_of("node_mul_3")
    node.metadata_props.add(key="namespace").MergeFromString(b"\x12\x03/\xff:")
    assert isinstance(node.metadata_props[0].value, bytes)
    assert find_module_path(node) == ""


@pytest.mark.parametrize("keys", [KEYS, KEYS[:1], KEYS[1:]])
def test_load_adds_the_module_of_the_metadata_to_the_names_of_nodes(keys):
    model = load(dynamo_model(keys, layers=1))
    assert [node.name for node in model.nodes] == NAMES
    assert not model.removed, "nodes with other names are not removed ones"


def test_names_that_have_their_module_stay_as_they_are():
    again = dynamo_model(layers=1)
    names = [*NAMES[:3], "/model/layers.0/Add", NAMES[4]]
    for node, name in zip(again.graph.node, names):
        node.name = name
    assert [node.name for node in load(again).nodes] == names


def test_nodes_without_names_or_with_equal_ones_have_their_module_too():
    model = dynamo_model(layers=2)
    for node in model.graph.node:
        node.name = "" if node.op_type == "MatMul" else "node"
    names = [node.name for node in load(model).nodes]
    assert names[:2] == ["model.layers.0.mlp.up/MatMul", "model.layers.0.mlp/node"]
    assert len(set(names)) == len(names)


def test_nodes_have_aliases():
    modules = ["model.layers.0.mlp", "model.layers.0", "model.layers", "model", ""]
    assert list(list_aliases(NAMES[1])) == ["model.layers.0.mlp.node_relu", "node_relu", *modules]
    aliases = ["model.norm.Mul", "model.norm", "model", ""]
    assert list(list_aliases("/model/norm/Mul")) == aliases, "Mul alone would be ambiguous"


@pytest.mark.parametrize(
    ("pattern", "positions"),
    [
        ("model.layers.0.mlp", [0, 1, 2]),
        ("model.layers.*.mlp", [0, 1, 2]),
        (r".*\.(up|down)", [0, 2]),
        ("model.layers", [0, 1, 2, 3]),
        ("node_relu", [1]),
        ("node_linear_.", [0, 2]),
        (NAMES[4], [4]),
        ("lm_head.*", [4]),
        (".*add", [3]),
        ("", []),
        ("model.layers.1", []),
        ("mlp", []),
        ("/model/layers.0/mlp", [0, 1, 2]),
        (r"model/layers\.\d/.*/node_.*", [0, 1, 2]),
    ],
)
def test_patterns_match_names_or_else_modules(pattern, positions):
    assert match_nodes([pattern], NAMES, "--colocate") == [positions]


TEXTS = st.text("ab/.0", max_size=6)


@given(st.lists(TEXTS, max_size=8), st.lists(st.text("ab/.*", max_size=4).filter(lambda text: "*" not in text[:1])))
def test_a_pattern_matches_names_or_else_aliases(names, patterns):
    patterns = [pattern for pattern in patterns if "**" not in pattern]
    for pattern, positions in zip(patterns, match_nodes(patterns, names, "--colocate")):
        by_name = [index for index, name in enumerate(names) if re.fullmatch(pattern, name)]
        path = re.sub(r"^/(?=\w)", "", pattern).replace("/", ".")
        known = [{*list_aliases(name)} - {""} for name in names]
        by_alias = [i for i, aliases in enumerate(known) if any(re.fullmatch(path, alias) for alias in aliases)]
        assert positions == (by_name or by_alias)


def test_hints_offer_nodes_modules_and_values():
    assert suggest_nodes("model.layers.0.mpl", NAMES) == "did you mean 'model.layers.0.mlp'?"
    assert suggest_nodes("node_logit", NAMES) == "did you mean 'node_logits'?"
    assert suggest_nodes("attention_mas", NAMES, ["attention_mask"]) == "did you mean 'attention_mask'?"
    assert suggest_nodes("x", NAMES) == f"names look like {', '.join(map(repr, NAMES[:3]))}"
