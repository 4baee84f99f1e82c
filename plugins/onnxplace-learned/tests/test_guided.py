"""The placer `guided`: valid within limits, no worse than its fallback, the same for any order of devices."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from learned_support.learned_placers import check_fits_wherever_a_published_placer_does, without_hash
from learned_support.plain_guided import choose_devices
from onnxplace.cost_graph.part_functions import GENERATORS
from onnxplace.driver.place import place_cost_graph, replace_devices
from onnxplace.errors import InfeasibleError, InputError, UsageError
from onnxplace.facts import Groups, Profile
from onnxplace.problem import placement_problem
from onnxplace.testing.pass_contract import check_pass, random_state
from onnxplace_learned.graphs.architectures import ARCHITECTURES
from onnxplace_learned.guided import Guided
from onnxplace_learned.policies.guided_policy import (
    GROUP_FEATURES,
    NODE_FEATURES,
    PAIR_FEATURES,
    GuidedGraph,
    GuidedPolicy,
    GuidedShape,
    default_policy_path,
    plan_with_policy,
    read_guided_policy,
    run_schedule,
    write_guided_policy,
)
from onnxplace_learned.policies.placeto_learning import read_policy, write_policy
from onnxplace_learned.policies.placeto_network import Policy, Shape
from onnxplace_learned.policies.teacher import search_lesson

SHAPE = GuidedShape(width=6, message_width=4, hidden=5, rounds=2)
QUICK = {"seconds": 0.0, "proposals": 20, "schedules": 2}


def random_policy(seed=0):
    rng = np.random.default_rng(seed)
    tensors = {name: tensor + rng.normal(0, 0.1, tensor.shape) for name, tensor in SHAPE.draw_tensors(seed).items()}
    return GuidedPolicy(SHAPE, {name: tensor.astype(np.float32) for name, tensor in tensors.items()})


@pytest.fixture(scope="module")
def policy_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy") / "random.safetensors"
    write_guided_policy(path, random_policy())
    return path


@pytest.mark.slow
def test_the_pass_keeps_the_contract_of_passes_on_random_states(policy_file):
    check_pass(lambda: Guided(policy=str(policy_file), **QUICK))


@settings(max_examples=60, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    nodes=st.integers(1, 30),
    devices=st.integers(1, 6),
    pinned=st.booleans(),
    seconds=st.sampled_from([0.0, 0.001]),
)
def test_there_is_a_placement_wherever_a_published_placer_has_one(policy_file, seed, nodes, devices, pinned, seconds):
    state = random_state(seed, nodes, devices, facts=(Profile, Groups), tight=True, pinned=pinned)
    check_fits_wherever_a_published_placer_does(
        Guided(policy=str(policy_file), schedules=2, seconds=seconds, proposals=20), state
    )


@pytest.mark.parametrize("family", [*sorted(ARCHITECTURES), "layered"])
@pytest.mark.parametrize("devices", [1, 2, 5])
def test_it_is_not_worse_than_its_fallback(family, devices, policy_file):
    make = ARCHITECTURES.get(family) or GENERATORS[family]
    graph = replace_devices(make(70, 0), devices, None)
    result = place_cost_graph(graph, f"guided{{policy={policy_file},seconds=0.01,schedules=2}}")
    assert result.feasible
    for fallback in ("single", "m-etf"):
        expected = place_cost_graph(graph, fallback, groups="given").makespan_seconds
        assert result.makespan_seconds <= expected * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_compiled_schedules_choose_as_the_plain_policy(seed):
    problem = placement_problem(random_state(seed, nodes=25, devices=3, facts=(Profile, Groups)))
    graph, policy = GuidedGraph(problem), random_policy(seed)
    device, trace = run_schedule(graph, policy.prepare(graph))
    group_device = np.zeros(len(problem.pinned), dtype=int)
    group_device[problem.group] = device
    shown, scores = choose_devices(policy, graph, trace)
    for group, best in shown.items():
        # Scores that are equal but for rounding may be taken either way.
        assert scores[group][group_device[group]] == pytest.approx(scores[group][best], abs=1e-4)


@settings(max_examples=30, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), nodes=st.integers(1, 25), devices=st.integers(2, 5))
def test_what_the_policy_sees_does_not_depend_on_the_order_of_devices(seed, nodes, devices):
    problem = placement_problem(random_state(seed, nodes, devices))
    latency, _ = problem.target.link_arrays()
    links = tuple(replace(link, latency_seconds=latency[0, -1], bytes_per_second=1e9) for link in problem.target.links)
    target = replace(problem.target, links=links)
    # No node is free, or it would finish at once everywhere, and ties go to the first device.
    seconds = (problem.seconds[:1] + 1e-5) * np.linspace(1, 2, devices)[:, None]
    limits = np.full(devices, 1 << 50)
    straight = replace(problem, target=target, seconds=np.ascontiguousarray(seconds), limit_bytes=limits)
    turned = replace(straight, seconds=np.ascontiguousarray(seconds[::-1]))
    policy, forced = random_policy(seed), np.arange(nodes, dtype=np.int32) % devices
    graphs = GuidedGraph(straight), GuidedGraph(turned)
    choices = [policy.prepare(graph) for graph in graphs]
    np.testing.assert_allclose(choices[0].group_hidden, choices[1].group_hidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(choices[0].messages, choices[1].messages, rtol=1e-4, atol=1e-5)
    (_, first), (_, second) = (
        run_schedule(graph, choice, forced=devices)
        for graph, choice, devices in zip(graphs, choices, (forced, devices - 1 - forced))
    )
    np.testing.assert_allclose(first.features, second.features[:, ::-1], rtol=1e-4, atol=1e-5)


@settings(max_examples=40, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), nodes=st.integers(1, 30), devices=st.integers(1, 4))
def test_features_are_finite_and_bounded(seed, nodes, devices):
    problem = placement_problem(random_state(seed, nodes, devices, facts=(Profile, Groups)))
    graph, policy = GuidedGraph(problem), random_policy()
    _, trace = run_schedule(graph, policy.prepare(graph)) or (None, graph.new_trace())
    assert graph.node_features.shape == (len(problem.graph), NODE_FEATURES)
    assert graph.group_features.shape == (len(problem.pinned), GROUP_FEATURES)
    assert graph.pairs.features.shape == (len(graph.pairs.groups), PAIR_FEATURES)
    for features in (graph.node_features, graph.group_features, graph.pairs.features, trace.features):
        assert np.isfinite(features).all()
        assert np.abs(features).max(initial=0) <= 2


def test_a_graph_of_free_nodes_on_free_links_is_placed(policy_file):
    graph = GENERATORS["layered"](20, 0)
    free = replace(graph, profile=replace(graph.profile, seconds={k: 0 * v for k, v in graph.profile.seconds.items()}))
    assert place_cost_graph(free, f"guided{{policy={policy_file}}}").feasible


def test_proposals_make_it_deterministic(policy_file):
    graph = replace_devices(ARCHITECTURES["transformer"](60, 0), 3, None)
    placer = f"guided{{policy={policy_file},seconds=0,proposals=200}}"
    assert place_cost_graph(graph, placer).placement == place_cost_graph(graph, placer).placement


def test_sampled_schedules_differ_and_the_best_is_first():
    problem = placement_problem(replace_devices(ARCHITECTURES["transformer"](60, 0), 3, None).state())
    plans = plan_with_policy(problem, random_policy(), 6, 0, "policy")
    assert len({plan.device.tobytes() for plan in plans}) == len(plans) > 1
    steps = [problem.simulate(plan.device, plan.order).makespan_seconds for plan in plans]
    assert steps == sorted(steps)


def test_a_large_graph_is_coarsened(policy_file):
    graph = ARCHITECTURES["recurrent_cells"](300, 0)
    assert place_cost_graph(graph, f"guided{{policy={policy_file},max_nodes=100}}").feasible


def test_nothing_fits_says_which_device_lacks_memory(policy_file):
    graph = replace_devices(ARCHITECTURES["transformer"](60, 1), 2, 1000)
    with pytest.raises(InfeasibleError, match=r"error\[P002\] guided: .*cuda:0 lacks"):
        place_cost_graph(graph, f"guided{{policy={policy_file}}}")


def test_a_lesson_is_not_worse_than_what_it_started_from():
    problem = placement_problem(replace_devices(ARCHITECTURES["two_towers"](60, 0), 3, None).state())
    lesson = search_lesson(problem, 300, 0)
    assert lesson.seconds <= lesson.fallback_seconds
    assert lesson.device.tolist() == search_lesson(problem, 300, 0).device.tolist()
    assert search_lesson(replace(problem, limit_bytes=np.ones(3, dtype=np.int64)), 300, 0) is None


# ---------------------------------------------------------------------------------------------- policies


def test_the_policy_of_the_package_is_small_and_can_be_read():
    path = default_policy_path()
    policy = read_guided_policy(path)
    assert path.stat().st_size < 200_000
    assert policy.graphs > 0
    assert place_cost_graph(GENERATORS["chains"](30, 0), "guided").feasible


def test_a_policy_is_read_as_it_was_written(tmp_path):
    policy = replace(random_policy(3), families="chains", graphs=4, devices=3, steps=9, seed=3)
    write_guided_policy(tmp_path / "p.safetensors", policy)
    again = read_guided_policy(tmp_path / "p.safetensors")
    assert replace(again, tensors={}) == replace(policy, tensors={})
    assert all((again.tensors[name] == tensor).all() for name, tensor in policy.tensors.items())


def test_policies_of_another_kind_are_refused_by_name(tmp_path, policy_file):
    shape = Shape(2, width=2, rounds=1)
    write_policy(tmp_path / "placeto.safetensors", Policy(shape, shape.draw_parameters(0)))
    with pytest.raises(InputError, match=r"H003.*expected a policy 'guided'(.|\n)*learn guided"):
        read_guided_policy(tmp_path / "placeto.safetensors")
    with pytest.raises(InputError, match=r"H003.*expected a policy 'placeto'"):
        read_policy(policy_file)


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        (b'"version":"1"', b'"version":"2"', "H003"),
        (b'"hidden":"5"', b'"hidden":"6"', "H003"),
        (b'"rounds":"2"', b'"rounds":"x"', "H003"),
        (b'"format":"onnxplace.policy"', b'"format":"something.police"', "H003"),
        (b'"group.bias"', b'"grope.bias"', "H003"),
    ],
)
def test_damaged_foreign_and_newer_policies_are_refused(policy_file, tmp_path, before, after, code):
    data = without_hash(policy_file.read_bytes())
    assert before in data
    path = tmp_path / "p.safetensors"
    path.write_bytes(data.replace(before, after))
    with pytest.raises(InputError, match=rf"error\[{code}\].*p\.safetensors"):
        read_guided_policy(path)


def test_a_part_of_a_policy_and_numbers_that_are_not_finite_are_refused(policy_file, tmp_path):
    path = tmp_path / "p.safetensors"
    data = without_hash(policy_file.read_bytes())
    path.write_bytes(data[:-4])
    with pytest.raises(InputError, match="H003"):
        read_guided_policy(path)
    path.write_bytes(data[:-4] + np.float32(np.nan).tobytes())
    with pytest.raises(InputError, match=r"H003.*not finite"):
        read_guided_policy(path)


def test_a_missing_policy_is_named():
    with pytest.raises(InputError, match=r"H003.*nowhere\.safetensors"):
        place_cost_graph(GENERATORS["chains"](20, 0), "guided{policy=nowhere.safetensors}")


def test_a_schedule_is_needed():
    with pytest.raises(UsageError, match="schedules"):
        place_cost_graph(GENERATORS["chains"](20, 0), "guided{schedules=0}")
