"""Random training steps: their roles are those that the builder knows, and all groupings compute the same."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import onnxplace
from onnxplace.driver.compile import compile_model
from onnxplace.facts import Groups, Profile
from onnxplace.graph.op_graph import OpGraph
from onnxplace.model.loading import load
from onnxplace.model.lowering import build_op_graph, infer_static_shapes, value_bytes
from onnxplace.model.model import Model
from onnxplace.model.state_binding import bind_states
from onnxplace.model_metadata import Phase, TrainingRoles
from onnxplace.passes.placement.grouping.node_groups import list_parameter_members
from onnxplace.pipeline.pipeline import Pipeline, make_pass, run_pass
from onnxplace.state import State
from onnxplace.target.target import Device, Target
from onnxplace_training.recognise_step import recognise_training_step
from tests.support.random_training_steps import make_random_step
from tests.support.reference_simulator import even_target
from tests.support.training_models import ReferenceTrainer, draw_batch

seeds = st.integers(0, 2**32 - 1)
thorough = settings(deadline=None, derandomize=True, max_examples=25)


def recognise(seed: int, *, has_metadata: bool) -> tuple[Model, OpGraph, TrainingRoles]:
    """Return a random step as passes see it, and its roles."""
    proto = make_random_step(seed, has_metadata=has_metadata)
    bound = bind_states(load(proto), () if has_metadata else ("*.new=*",))
    model = run_pass(make_pass("optimize"), State(Target((Device("cpu:0", 1 << 30),))).with_facts(bound))[Model]
    graph = build_op_graph(model, value_bytes(model, infer_static_shapes(model)))
    roles = recognise_training_step(model, graph)
    assert roles is not None
    return model, graph, roles


def reachable_parameters(model: Model, graph: OpGraph, roles: TrainingRoles) -> list[set[int]]:
    """Return, per node, the parameters whose new values, or those of whose moments, it leads to."""
    number = {
        output.output: index for index, item in enumerate(roles.step.parameters) for output in (item, *item.moments)
    }
    reached: list[set[int]] = [set() for _ in range(len(graph))]
    for node in graph.order[::-1].tolist():
        names = [graph.value_names[value] for value in graph.outputs[node]]
        reached[node] |= {number[name] for name in names if name in number}
        for reader in graph.successors[node].tolist():
            reached[node] |= reached[reader]
    return reached


@thorough
@given(seeds)
def test_roles_by_the_flow_of_data_are_those_that_the_builder_knows(seed):
    _, _, told = recognise(seed, has_metadata=True)
    model, graph, derived = recognise(seed, has_metadata=False)
    different = np.flatnonzero(told.phase != derived.phase)
    assert [graph.names[node] for node in different] == []
    np.testing.assert_array_equal(told.parameter, derived.parameter)
    np.testing.assert_array_equal(told.owner, derived.owner)
    for own, other in zip(derived.step.parameters, told.step.parameters, strict=True):
        assert (own.input, own.output) == (other.input, other.output)
        assert [(m.input, m.output) for m in own.moments] == [(m.input, m.output) for m in other.moments]
    reached = reachable_parameters(model, graph, derived)
    for node, parameter in enumerate(derived.parameter.tolist()):
        is_own = derived.phase[node] != Phase.FORWARD and len(reached[node]) == 1
        assert parameter == (min(reached[node]) if is_own else -1)


@thorough
@given(seeds)
def test_nodes_are_with_the_parameter_that_they_read_else_with_the_one_that_they_work_for(seed):
    _, graph, roles = recognise(seed, has_metadata=False)
    members, first = list_parameter_members(graph, roles)
    assert len(set(members.tolist())) == len(members)
    assert (first <= members).all()
    home = dict(zip(members.tolist(), first.tolist()))
    index = {name: value for value, name in enumerate(graph.value_names)}
    readers = [set(graph.readers[index[item.input]].tolist()) for item in roles.step.parameters]
    for number, nodes in enumerate(readers):
        only = {node for node in nodes if sum(node in others for others in readers) == 1}
        assert len({home[node] for node in only}) <= 1
        reads_none = {node for node in home if not any(node in others for others in readers)}
        working = {node for node in reads_none if roles.parameter[node] == number and graph.ops[node] == "Sub"}
        assert {home[node] for node in working} <= {home[node] for node in only} or not only
    assert set(np.flatnonzero(roles.parameter >= 0).tolist()) <= set(home)


@thorough
@given(seeds, st.sampled_from(["together", "free"]), st.sampled_from(["free", "follow"]))
def test_groups_keep_parameters_and_followers_together(seed, parameters, backward):
    proto = make_random_step(seed)
    state = State(even_target(2)).with_facts(bind_states(load(proto), ()))
    text = f"optimize,profile{{estimate=true}},coplace{{join=never,parameters={parameters},backward={backward}}}"
    after, _ = Pipeline.parse(text).run(state)
    graph, group, roles = after[Profile].graph, after[Groups].group, after[Profile].training
    assert roles is not None
    if parameters == "together":
        members, first = list_parameter_members(graph, roles)
        np.testing.assert_array_equal(group[members], group[first])
    if backward == "follow":
        follows = roles.owner >= 0
        np.testing.assert_array_equal(group[follows], group[roles.owner[follows]])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", ["", "{backward=follow}", "{parameters=free}", "{join=always,backward=follow}"])
def test_every_grouping_computes_what_the_model_computes(seed, options, tmp_path):
    proto = make_random_step(seed)
    text = f"optimize,profile{{estimate=true}},coplace{options},fuse,m-topo,split,emit"
    bundle = compile_model(proto, tmp_path / "step", devices="cpu:0,cpu:1", pipeline=text, trial=False).bundle
    reference, count = ReferenceTrainer(proto), 0
    states = dict(reference.states)
    with onnxplace.InferenceSession(bundle) as session:
        for count in range(1, 4):
            feeds = draw_batch(proto, count)
            counted = (
                {"step": np.array(count, dtype=np.int64)} if any(i.name == "step" for i in proto.graph.input) else {}
            )
            first = states if count == 1 else {}
            (loss,) = session.run(["loss"], {**feeds, **counted, **first, "learning_rate": np.float32(0.01)})
            assert float(loss) == pytest.approx(reference.step(feeds), rel=1e-5)
    assert count == 3
