"""The pass `stream`: limits, sources, what streams and what stays, and errors that say what is needed."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from onnx import TensorProto, helper, numpy_helper, parser

from onnxplace.errors import InfeasibleError, OnnxplaceError
from onnxplace.facts import Original, Placement, Profile, Schedule, Segments, Source, Streaming
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind, build_op_graph, infer_static_shapes, value_bytes
from onnxplace.passes.stream import Stream
from onnxplace.passes.streaming.source_program import DISK, RESIDENT, Choice
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.problem import predict_step_seconds, predict_waiting_seconds
from onnxplace.simulation.weight_streams import PoolLayout, measure_block
from onnxplace.state import State
from onnxplace.target.target import Device, Link, Pool, Target
from tests.support.random_models import RandomModel, random_models

MIB = 1 << 20
GPU, HOST = Device("cuda:0", 64 * MIB, model="fast"), Device("cpu:0", 1 << 30, cores=2)


def make_state(proto, target, dimensions=None, sizes=None, begins=None):
    """Return a state with costs that follow from the sizes of weights: the GPU computes ten times as fast.

    With `sizes`, weights count as so many bytes, whatever they are in the file. With `begins`, whether a node begins a
    kernel; otherwise each is one.
    """
    model = bind(load(proto), dimensions or {}, {})
    graph = build_op_graph(model, value_bytes(model, infer_static_shapes(model)))
    if sizes is not None:
        graph = replace(graph, weight_bytes=np.resize(np.array(sizes) * MIB, len(graph.weight_names)))
    read = np.array([graph.weight_bytes[graph.weights[node]].sum() for node in range(len(graph))])
    seconds = {device.cost_class: 1e-6 + read / (2e10 if device.is_host else 2e11) for device in target.devices}
    sources = {name: np.full(len(graph), Source.ESTIMATED, dtype=np.uint8) for name in seconds}
    unit = np.cumsum(np.resize([True] if begins is None else begins, len(graph))[1:])
    unit = np.concatenate([[0], unit]).astype(np.int32) if len(graph) else np.zeros(0, np.int32)
    profile = Profile(graph=graph, seconds=seconds, sources=sources, unit=unit)
    return State(target).with_facts(model, profile)


def chain(layers=12, width=512):
    """Return a chain of products with weights of 1 MiB each."""
    lines = [f"[mm{i}] v{i + 1} = MatMul(v{i}, w{i})" for i in range(layers)]
    text = f"""<ir_version: 8, opset_import: ["": 17]>
    g (float[1, {width}] v0) => (float[1, {width}] v{layers}) {{ {" ".join(lines)} }}"""
    model = parser.parse_model(text)
    for i in range(layers):
        array = np.random.default_rng(i).standard_normal((width, width)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, f"w{i}"))
    return model


def run(state, text="stream"):
    return Pipeline.parse(f"coplace{{join=never}},fuse,{text},split").run(state)[0]


@settings(
    max_examples=50,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(
    random_models(max_nodes=24),
    st.lists(st.integers(0, 40), min_size=1, max_size=9),
    st.integers(20, 120),
    st.sampled_from(("", "{host=30MiB}", "{pool=45MiB}", "{always=true}")),
    st.booleans(),
    st.lists(st.booleans(), min_size=1, max_size=9),
)
def test_random_models_keep_their_limits_and_every_weight_has_a_home(
    model: RandomModel, sizes, limit, options, has_host, begins
):
    target = Target((replace(GPU, memory_bytes=limit * MIB), *([replace(HOST, memory_bytes=200 * MIB)] * has_host)))
    try:
        state = make_state(model.proto, target, model.dimensions, sizes, begins)
    except OnnxplaceError:
        assume(False)
    try:
        after = run(state, f"stream{options}")  # the pipeline checks all facts: limits, sources, devices
    except InfeasibleError:
        return
    streaming, graph = after[Streaming], after[Profile].graph
    assert (after[Segments].simulation.peak_bytes <= [device.memory_bytes for device in target.devices]).all()
    size = dict(zip(graph.weight_names, graph.weight_bytes.tolist()))
    assert all(size[name] == 0 for name in streaming.sources)
    assert_pools_hold_their_blocks(after)
    again = run(state, f"stream{options}")
    assert again[Streaming].sources == streaming.sources
    assert again[Placement].device.tolist() == after[Placement].device.tolist()
    if "always" not in options:
        try:
            alone = run(state, "single")
        except InfeasibleError:
            return
        assert predict_step_seconds(after) <= 1.05 * predict_step_seconds(alone) + 1e-4


def assert_pools_hold_their_blocks(state):
    """Lay the blocks out as the runtime does, and compare each pool with all that streams through it."""
    streaming, graph = state[Streaming], state[Profile].graph
    for device, stream in streaming.streams.items():
        own = [segment.nodes for segment in state[Segments].segments if segment.device == device]
        reads = [{graph.weight_names[weight] for node in nodes for weight in graph.weights[node]} for nodes in own]
        sizes = [
            measure_block(streaming.weight_bytes[name] for name in names & set(streaming.sources)) for names in reads
        ]
        PoolLayout.of([size for size in sizes if size], stream.pool_bytes)  # raises an error where one does not fit
        assert stream.pool_bytes <= sum(sizes)


@pytest.mark.parametrize("begins", [[True, False], [True, False, False, False], [True] + [False] * 5])
@pytest.mark.parametrize("limit", [7, 14, 21])
def test_kernels_whose_first_node_reads_no_weight_do_not_share_a_block(begins, limit):
    """In float16, ONNX Runtime on processors makes one kernel of the nodes of a layer, and more."""
    lines = [f"[n{i}] m{i} = Relu(v{i}) [mm{i}] v{i + 1} = MatMul(m{i}, w{i})" for i in range(12)]
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
    g (float[1, 8] v0) => (float[1, 8] v12) {{ {" ".join(lines)} }}""")
    model.graph.initializer.extend(numpy_helper.from_array(np.ones((8, 8), np.float32), f"w{i}") for i in range(12))
    target = Target((replace(HOST, memory_bytes=limit * MIB),))
    state = run(make_state(model, target, sizes=[2], begins=begins))
    assert state[Streaming].sources
    assert_pools_hold_their_blocks(state)


def test_a_table_that_is_only_looked_up_does_not_decide_about_the_pool():
    lines = " ".join(f"[mm{i}] v{i + 1} = MatMul(v{i}, w{i})" for i in range(8))
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
    g (int64[1] x) => (float[1, 8] v8) {{ [look] v0 = Gather(table, x) {lines} }}""")
    for name in ("table", *(f"w{i}" for i in range(8))):
        model.graph.initializer.append(numpy_helper.from_array(np.ones((8, 8), np.float32), name))
    sizes = [200, *[2] * 8]
    after = run(make_state(model, Target((replace(HOST, memory_bytes=13 * MIB),)), sizes=sizes))
    assert after[Streaming].streams[0].pool_bytes <= 4 * MIB
    with pytest.raises(InfeasibleError, match=r"needs at least 20\d{5} bytes, of which 2097152 for .* node 'mm0'"):
        run(make_state(model, Target((replace(HOST, memory_bytes=MIB),)), sizes=sizes))


def test_a_device_whose_pool_has_room_for_all_that_would_stream_holds_it(monkeypatch):
    def choose_one(problem):
        source = np.where(np.arange(len(problem.group)) == 5, DISK, RESIDENT)
        return Choice(np.zeros(len(source), np.int32), source, 0.0)

    monkeypatch.setattr("onnxplace.passes.stream.choose_sources", choose_one)
    state = make_state(chain(), Target((replace(HOST, memory_bytes=20 * MIB),)))
    assert run(state, "stream{pool=1023KiB}")[Streaming].sources == {}  # no weight may stream through it
    assert run(state, "stream{pool=4MiB}")[Streaming].sources == {}


def test_a_pool_has_no_more_than_what_streams_through_it():
    state = make_state(chain(), Target((replace(HOST, memory_bytes=64 * MIB),)))
    after = run(state, "stream{pool=45MiB,always=true}")
    assert len(after[Streaming].sources) == 12
    assert after[Streaming].streams[0].pool_bytes == 12 * MIB


def test_what_has_room_stays_and_the_rest_streams_evenly():
    state = run(make_state(chain(), Target((replace(HOST, memory_bytes=9 * MIB),))))
    streaming = state[Streaming]
    assert set(streaming.sources.values()) == {"disk"}
    assert 4 <= len(streaming.sources) <= 6
    layers = sorted(int(name[1:]) for name in streaming.sources)
    assert layers[0] < 4
    assert layers[-1] > 7
    assert max(np.diff(layers)) <= 6
    assert state[Schedule].simulation.peak_bytes[0] <= 9 * MIB
    assert predict_waiting_seconds(state) > 0
    assert state[Original].profile.graph.total_weight_bytes == 12 * MIB


@pytest.mark.slow
def test_more_memory_makes_no_step_longer():
    steps = []
    for limit in (3, 5, 7, 9, 11, 13):
        state = run(make_state(chain(), Target((replace(HOST, memory_bytes=limit * MIB),))))
        steps.append(predict_step_seconds(state))
    assert all(later <= before * 1.02 for before, later in pairwise(steps))
    assert not state[Streaming].sources


def test_the_host_computes_while_the_link_is_slow():
    """Over a slow link, weights take longer to come than the host takes for their nodes."""
    link = Link("cpu:0", "cuda:0", 1e-5, 5e9)
    target = Target((replace(GPU, memory_bytes=4 * MIB), HOST), (link, Link("cuda:0", "cpu:0", 1e-5, 5e9)))
    state = run(make_state(chain(), target))
    device = state[Placement].device
    assert 0 < (device == 1).sum() < 12
    assert np.count_nonzero(np.diff(device)) <= 2  # nodes of the host are neighbours
    off = run(make_state(chain(), Target(target.devices[:1], ())))
    assert predict_step_seconds(state) < predict_step_seconds(off)


def test_the_memory_of_the_host_bounds_what_it_keeps():
    state = run(make_state(chain(), Target((replace(GPU, memory_bytes=5 * MIB),))), "stream{host=4MiB}")
    sources = list(state[Streaming].sources.values())
    assert sources.count("host") == 4
    assert sources.count("disk") >= 4
    assert state[Streaming].streams[0].bytes_per_second.keys() == {"host", "disk"}


@pytest.mark.slow
def test_several_devices_stream_at_the_same_time():
    target = Target(tuple(replace(GPU, id=f"cuda:{index}", memory_bytes=4 * MIB) for index in range(2)))
    state = run(make_state(chain(), target))
    assert state[Streaming].streams.keys() == {0, 1}
    one = run(make_state(chain(), Target(target.devices[:1])))
    assert predict_step_seconds(state) < 0.8 * predict_step_seconds(one)


def test_weights_that_are_looked_up_stay_in_the_file_for_processors():
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (int64[1] x) => (float[1, 512] y) { [look] e = Gather(table, x) [mm] y = MatMul(e, w) }"""
    model = parser.parse_model(text)
    for name, rows in (("table", 4096), ("w", 512)):
        model.graph.initializer.append(numpy_helper.from_array(np.ones((rows, 512), np.float32), name))
    state = run(make_state(model, Target((replace(HOST, memory_bytes=2 * MIB),))))
    assert "table" not in state[Streaming].sources
    assert state[Schedule].simulation.peak_bytes[0] < 2 * MIB
    state = run(make_state(model, Target((replace(GPU, memory_bytes=16 * MIB),))), "stream{always=true}")
    assert "table" in state[Streaming].sources  # other devices hold the whole table


def test_a_weight_that_two_nodes_read_stays():
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[1, 512] x) => (float[1, 512] y) { [a] t = MatMul(x, w) [b] u = MatMul(t, v) [c] y = MatMul(u, w) }"""
    model = parser.parse_model(text)
    for name in "vw":
        model.graph.initializer.append(numpy_helper.from_array(np.ones((512, 512), np.float32), name))
    state = run(make_state(model, Target((HOST,))), "stream{always=true}")
    assert state[Streaming].sources.keys() == {"v"}


def test_types_of_less_than_a_byte_stay():
    weight = helper.make_tensor("w", TensorProto.INT4, [2048, 1024], bytes(1 << 20), raw=True)
    text = """<ir_version: 10, opset_import: ["": 21]>
    g (float[1, 2048] x) => (float[1, 1024] y)
    { [open] d = DequantizeLinear(w, s) [mm] y = MatMul(x, d) }"""
    model = parser.parse_model(text)
    model.graph.initializer.extend([weight, numpy_helper.from_array(np.float32(1), "s")])
    onnx.checker.check_model(model)
    state = run(make_state(model, Target((HOST,))), "stream{always=true}")
    assert not state[Streaming].sources


def test_a_pool_that_is_too_small_says_how_large_it_must_be():
    state = make_state(chain(), Target((replace(HOST, memory_bytes=6 * MIB),)))
    with pytest.raises(
        InfeasibleError, match=r"the weights of node 'mm0' must stream, and have 1048576 bytes"
    ) as caught:
        run(state, "stream{pool=900KiB}")
    assert (caught.value.code, caught.value.hint) == ("P066", "--pool 1048576 or more")


def test_a_pool_without_room_on_the_device_is_not_called_the_weights_of_a_node():
    state = make_state(chain(), Target((replace(HOST, memory_bytes=2 * MIB),)))
    with pytest.raises(InfeasibleError, match=r"of which 3145728 for the pool, and may use 2097152"):
        run(state, "stream{pool=3MiB}")


def test_a_limit_that_is_too_small_says_what_is_needed():
    state = make_state(chain(), Target((replace(HOST, memory_bytes=MIB),)))
    with pytest.raises(InfeasibleError, match=r"cpu:0 needs at least (\d+) bytes") as caught:
        run(state)
    needed = int(caught.value.message.split("at least ")[1].split()[0])
    enough = make_state(chain(), Target((replace(HOST, memory_bytes=needed + 100),)))
    assert len(run(enough)[Streaming].sources) == 12


def test_a_model_without_large_weights_says_what_is_missing():
    state = make_state(chain(layers=3, width=16), Target((replace(HOST, memory_bytes=1024),)))
    with pytest.raises(InfeasibleError, match="lacks") as caught:
        run(state)
    assert caught.value.code == "P002"


def test_the_note_says_what_streams_what_stays_and_how_far_it_is_from_the_best_choice():
    state = make_state(chain(), Target((replace(HOST, memory_bytes=9 * MIB),)))
    note = next(note for note in run(state).diagnostics if note.code == "P067")
    assert "cpu:0 computes 12 nodes" in note.message
    assert "come from disk" in note.message
    assert "from the best choice" in note.message
    assert Stream.name == note.where


@pytest.mark.parametrize("pool", [6, 9, 14, 40])
def test_devices_of_a_pool_stream_within_its_memory(pool):
    # An integrated GPU and its processor have 12 MiB of weights, and a pool that holds all of them or a part.
    devices = replace(GPU, memory_bytes=40 * MIB), replace(HOST, memory_bytes=40 * MIB)
    target = Target(devices, pools=(Pool(("cuda:0", "cpu:0"), pool * MIB),))
    state = run(make_state(chain(), target))
    simulation = state[Segments].simulation
    assert simulation.pool_peak_bytes.tolist() <= [pool * MIB]
    assert bool(state[Streaming].sources) == (pool < 14)
    assert int(simulation.pool_peak_bytes[0]) > 2 * MIB


def test_a_pool_without_room_for_a_stream_is_refused():
    devices = replace(GPU, memory_bytes=40 * MIB), replace(HOST, memory_bytes=40 * MIB)
    target = Target(devices, pools=(Pool(("cuda:0", "cpu:0"), MIB // 2),))
    with pytest.raises(InfeasibleError) as caught:
        run(make_state(chain(), target))
    assert caught.value.code in ("P002", "P066")
