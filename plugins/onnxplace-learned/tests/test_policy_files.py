"""Policies on disk: what is written is read; what is damaged, foreign or newer is refused by name."""

import json
import pickle
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from learned_support.learned_placers import without_hash
from onnxplace.errors import InputError, UsageError
from onnxplace.facts import Profile
from onnxplace.problem import placement_problem
from onnxplace.target.target import Target
from onnxplace.testing.pass_contract import random_state
from onnxplace_learned.policies.placeto_learning import (
    Learner,
    read_learner,
    read_policy,
    require_devices,
    write_policy,
)
from onnxplace_learned.policies.placeto_network import Policy, Shape, hash_names, split_parameters
from onnxplace_learned.policies.placing import recall_placement
from onnxplace_training import map_arrays, write_arrays

SHAPE = Shape(devices=3, width=4, rounds=2)


def make_policy(seed=0) -> Policy:
    return Policy(SHAPE, SHAPE.draw_parameters(seed), "bfs", "first-device", "chains", 32, 7, 5)


@pytest.fixture
def policy_file(tmp_path):
    path = tmp_path / "policy.safetensors"
    write_policy(path, make_policy())
    return path


def header_of(data):
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(data, change):
    """Return a file with a changed header."""
    header, body = header_of(without_hash(data))
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def test_a_policy_is_read_as_it_was_written(policy_file):
    policy = read_policy(policy_file)
    assert policy.theta.tolist() == make_policy().theta.tolist()
    assert replace(policy, theta=None) == replace(make_policy(), theta=None)
    assert read_learner(policy_file)[1] is None


def test_kept_placements_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "policy.safetensors"
    kept = {hash_names(["a", "b"]): np.array([1, 0], dtype=np.int32), hash_names([]): np.zeros(0, dtype=np.int32)}
    write_policy(path, replace(make_policy(), kept=kept))
    assert {key: device.tolist() for key, device in read_policy(path).kept.items()} == {
        key: device.tolist() for key, device in kept.items()
    }


@pytest.mark.parametrize("number", [-1.0, 0.5, float(SHAPE.devices), np.nan])
def test_kept_placements_on_no_devices_are_refused(tmp_path, number):
    path = tmp_path / "policy.safetensors"
    write_policy(path, replace(make_policy(), kept={"0" * 16: np.array([number])}))
    with pytest.raises(InputError, match=r"the policy is damaged: .*kept"):
        read_policy(path)


@pytest.mark.parametrize("seed", range(8))
def test_a_kept_placement_is_recalled_for_graphs_of_the_same_names(seed):
    problem = placement_problem(random_state(seed, nodes=12, devices=2, facts=(Profile,), pinned=True))
    names, device = problem.graph.names, np.full(len(problem.members), 1, dtype=np.int32)
    policy = replace(make_policy(), kept={hash_names(names): device})
    known = recall_placement(policy, problem, names)
    pinned = problem.pinned[problem.group]
    assert known is not None
    assert known.device.tolist() == np.where(pinned >= 0, pinned, 1).tolist()
    assert recall_placement(policy, problem, [*names[1:], "another"]) is None
    few = replace(problem, target=Target(problem.target.devices[:1]))
    assert recall_placement(policy, few, names) is None, "the second device is not there"


def test_a_checkpoint_also_has_the_moments_of_the_optimiser(tmp_path):
    policy = make_policy()
    learner = Learner(policy, policy.theta + 1, policy.theta**2, policy.theta - 1)
    write_policy(tmp_path / "c.safetensors", policy, learner)
    restored = read_learner(tmp_path / "c.safetensors")[1]
    assert restored.first.tolist() == learner.first.tolist()
    assert restored.second.tolist() == learner.second.tolist()
    assert restored.averaged_policy.theta.tolist() == learner.average.tolist()
    assert read_policy(tmp_path / "c.safetensors").theta.tolist() == policy.theta.tolist()


def test_what_it_learned_from_is_kept(policy_file):
    write_policy(policy_file, replace(make_policy(), learned_from="completions", start="several"))
    policy = read_policy(policy_file)
    assert (policy.learned_from, policy.start) == ("completions", "several")


def test_equal_policies_are_equal_files(policy_file, tmp_path):
    write_policy(tmp_path / "again.safetensors", make_policy())
    assert (tmp_path / "again.safetensors").read_bytes() == policy_file.read_bytes()


def test_a_file_is_safetensors_with_a_tensor_per_layer(policy_file):
    header, body = header_of(policy_file.read_bytes())
    assert header["__metadata__"]["format"] == "onnxplace.policy"
    assert header["encode.0.weight"]["shape"] == [10, 4]
    assert header["choose.2.bias"]["shape"] == [3]
    assert max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__") == len(body)
    assert len(body) == 4 * SHAPE.parameters


# ---------------------------------------------------------------------------------------------- refused files


def refuse(path, data, code):
    path.write_bytes(data)
    with pytest.raises(InputError, match=rf"error\[{code}\].*{path.name}"):
        read_policy(path)


@settings(max_examples=60)
@given(data=st.data())
def test_a_part_of_a_file_is_refused(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("part") / "policy.safetensors"
    write_policy(path, make_policy())
    whole = without_hash(path.read_bytes())
    kept = data.draw(st.integers(0, len(whole) - 1))
    refuse(path, whole[:kept], "H00[34]")


@settings(max_examples=200)
@given(data=st.data())
def test_a_changed_byte_is_refused_with_the_name_of_the_file_or_changes_a_parameter(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("byte") / "policy.safetensors"
    write_policy(path, make_policy())
    changed = bytearray(without_hash(path.read_bytes()))
    header_end = 8 + struct.unpack_from("<Q", changed)[0]
    position = data.draw(st.integers(0, header_end + 40))
    changed[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(changed)
    try:
        problem = ""
        assert read_policy(path).theta.dtype == np.float32
    except InputError as error:
        problem = str(error)
    assert not problem or (problem[:11] == "error[H003]" and path.name in problem)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda header: header["__metadata__"].update(version="3"), "H003"),
        (lambda header: header["__metadata__"].update(kind="go"), "H003"),
        (lambda header: header["__metadata__"].update(format="pt"), "H003"),
        (lambda header: header.pop("__metadata__"), "H003"),
        (lambda header: header["__metadata__"].pop("devices"), "H003"),
        (lambda header: header["__metadata__"].update(devices="4"), "H003"),
        (lambda header: header["__metadata__"].update(width="1000000000"), "H003"),
        (lambda header: header["__metadata__"].update(order="backwards"), "H003"),
        (lambda header: header["__metadata__"].update(start="anywhere"), "H003"),
        (lambda header: header["__metadata__"].update(learned_from="books"), "H003"),
        (lambda header: header.pop("encode.0.weight"), "H003"),
        (lambda header: header["encode.0.weight"].update(dtype="F64"), "H003"),
        (lambda header: header["encode.0.weight"].update(shape=[4, 10]), "H003"),
        (lambda header: header["encode.0.weight"].update(data_offsets=[0, 1 << 40]), "H003"),
        (lambda header: header.update(extra=header["encode.0.bias"]), "H003"),
    ],
)
def test_a_wrong_header_is_refused(policy_file, change, code):
    refuse(policy_file, with_header(policy_file.read_bytes(), change), code)


def test_parameters_of_another_type_are_refused(policy_file):
    policy = make_policy()
    arrays = {name: tensor.astype(np.float16) for name, tensor in split_parameters(SHAPE, policy.theta).items()}
    write_arrays(policy_file, arrays, map_arrays(policy_file, "H003", "").metadata)
    with pytest.raises(InputError, match=r"error\[H003\].*is of type float16, expected float32"):
        read_policy(policy_file)


def test_parameters_that_are_not_finite_are_refused(policy_file):
    data = bytearray(without_hash(policy_file.read_bytes()))
    data[-4:] = struct.pack("<f", np.nan)
    refuse(policy_file, bytes(data), "H003")


@pytest.mark.parametrize("data", [b"", b"GIF89a", pickle.dumps({"theta": [1.0]}), b"\x00" * 64, b"{" * 100])
def test_other_files_are_refused(policy_file, data):
    refuse(policy_file, data, "H00[34]")


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(InputError, match=r"error\[H003\].*missing\.safetensors"):
        read_policy(tmp_path / "missing.safetensors")


def test_a_policy_for_fewer_devices_than_there_are_is_refused():
    require_devices(make_policy(), 3, "p")
    with pytest.raises(UsageError, match=r"error\[H003\] p: .*at most 3 devices, expected 4"):
        require_devices(make_policy(), 4, "p")
