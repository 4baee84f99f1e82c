"""Devices, links and limits: parsed from text, written to TOML, and checked for consistency."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from onnxplace.errors import TargetError, UsageError
from onnxplace.target.kind_table import find_kind, list_kind_names
from onnxplace.target.parsing import DeviceSpec, parse_bytes, parse_devices, parse_memory
from onnxplace.target.target import LINK_MODELS, Device, Link, Pool, Target, default_link
from onnxplace.target.target_file import format_target, read_target

device_ids = st.builds("{}:{}".format, st.sampled_from(list_kind_names()), st.integers(0, 99))
id_lists = st.lists(device_ids, min_size=1, max_size=5, unique=True)
positive = st.floats(min_value=1e-12, max_value=1e12, allow_subnormal=False)
seconds = st.floats(min_value=0, max_value=1e3, allow_subnormal=False)
hardware_names = st.text(
    alphabet=st.characters(codec="ascii", exclude_characters='"\\', categories=["L", "N", "P", "Zs"])
)


@st.composite
def targets(draw, names=hardware_names) -> Target:
    ids = draw(id_lists)
    devices = [
        Device(
            id=name,
            memory_bytes=draw(st.integers(0, 2**50)),
            cores=draw(st.integers(1, 256)),
            model=draw(names),
            segment_seconds=draw(seconds),
        )
        for name in ids
    ]
    pairs = [(a, b) for a in ids for b in ids if a != b]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=6)) if pairs else []
    links = [Link(a, b, draw(seconds), draw(positive)) for a, b in chosen]
    return Target(tuple(devices), tuple(links), draw(st.sampled_from(LINK_MODELS)))


# ---------------------------------------------------------------------------------------------- device ids


@given(id_lists, st.sampled_from(["", " ", "  "]))
def test_device_ids_are_parsed_in_order(ids, blank):
    assert [item.id for item in parse_devices(f"{blank},{blank}".join(ids))] == ids
    assert [item.id for item in parse_devices(ids)] == ids


@pytest.mark.parametrize(
    ("text", "meant"),
    [("gpu1", "cuda:1"), ("cuda7", "cuda:7"), ("CPU2", "cpu:2"), ("cud", "cuda:0"), ("cudda:3", "cuda:3")],
)
def test_an_id_without_its_colon_gets_a_suggestion(text, meant):
    with pytest.raises(TargetError, match="T005") as caught:
        parse_devices(text)
    assert caught.value.hint.startswith(f"did you mean '{meant}'?")


def test_a_link_from_a_device_to_itself_is_refused(tmp_path):
    (tmp_path / "t.toml").write_text(
        '[[devices]]\nid = "cpu:0"\nmemory_bytes = 1\n'
        '[[links]]\nsource = "cpu:0"\ndestination = "cpu:0"\nlatency_seconds = 0.0\nbytes_per_second = 1e9\n'
    )
    with pytest.raises(TargetError, match="a link cannot lead from a device to itself") as caught:
        read_target(tmp_path / "t.toml")
    assert (caught.value.code, caught.value.where) == ("T007", f"{tmp_path / 't.toml'}, link cpu:0 -> cpu:0")


@given(id_lists)
def test_a_repeated_device_is_refused(ids):
    with pytest.raises(TargetError, match="twice"):
        parse_devices([*ids, ids[0]])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpus:0", ("'cpus:0'", "did you mean 'cpu:0'?")),
        ("cuad:0", ("'cuad:0'", "did you mean 'cuda:0'?")),
        ("tpu", ("'tpu'", "cpu:0")),
        ("cpu:", ("'cpu:'", "cpu:0")),
        ("cuda:-1", ("'cuda:-1'", "cuda:0")),
        ("cpu:0,cpu:x", ("'cpu:x'", "cpu:0")),
        (" , ,", ("empty", "cpu:0")),
        ([], ("empty", "cpu:0")),
    ],
    ids=str,
)
def test_a_bad_device_id_is_named_with_a_suggestion(text, expected):
    with pytest.raises(TargetError) as caught:
        parse_devices(text)
    for words in expected:
        assert words in str(caught.value)


@pytest.mark.parametrize("text", ["cpu:0,cpu:00", "cpu:0,cpu:\u0660"])
def test_two_spellings_of_one_device_are_a_duplicate(text):
    with pytest.raises(TargetError):
        parse_devices(text)


@pytest.mark.parametrize(
    ("text", "device", "options"),
    [
        ("cuda:0/1", "cuda:0/1", {}),
        ("cuda:00/01", "cuda:0/1", {}),
        ("cuda:0{provider=tensorrt}", "cuda:0", {"provider": "tensorrt"}),
        ("cuda:0 { provider = tensorrt }", "cuda:0", {"provider": "tensorrt"}),
        ("cuda:0{}", "cuda:0", {}),
    ],
)
def test_devices_have_parts_and_options(text, device, options):
    first, second = parse_devices(f"{text},cpu:0")
    assert (first, second) == (DeviceSpec(device, options), DeviceSpec("cpu:0"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cuda:0{provder=tensorrt}", ("T005", "cuda:0 has no option 'provder'", "did you mean 'provider'?")),
        ("cuda:0{provider=tensorflow}", ("T005", "expected one of cuda, tensorrt", "did you mean 'tensorrt'?")),
        ("cpu:0{provider=cpu}", ("T005", "cpu:0 has no option 'provider'", "isolate")),
        ("cpu:0{isolate=yes}", ("T005", "expected one of false, true for isolate, got 'yes'")),
        ("cuda:0{provider}", ("T005", "name=value", "'provider'")),
        ("cuda:0{provider=cuda,provider=cuda}", ("T005", "each once")),
        ("cuda:0{provider=cuda", ("T005", "have no end", "cuda:0{name=value}")),
        ("nqu:0", ("T005", "unknown device 'nqu:0'", "did you mean 'npu:0'?")),
        ("2", ("T005", "unknown device '2'", "name each device, as in cpu:0,cpu:1")),
        ("cpu:0/0", ("T005", "cannot be one of several on cpu:0")),
        ("cuda:0/", ("T005", "no number after the slash", "cuda:0/0")),
        ("cuda:0/X", ("T005", "no number after the slash")),
        ("cpu:1-0", ("T005", "cannot be several processors", "cpu:0-3")),
        ("cuda:0-1", ("T005", "cannot be several processors")),
        ("cpu:0-256", ("T005", "cannot be several processors", "256 is the most")),
        (f"cpu:0-{'9' * 5000}", ("T005", "expected an index of at most")),
        (f"cuda:{'9' * 5000}/tf32", ("T005", "expected an index of at most")),
        ("cpu:0{threads=0}", ("T005", "expected a number of 1 to", "threads")),
        ("cpu:0{option.x=1}", ("T005", "has no option 'option.x'")),
        ("cuda:0{tf32=1}", ("T005", "has no option 'tf32'", "option.tf32")),
        ("cuda:0,cuda:0/1", ("T005", "as a whole and in parts", "cuda:0/0,cuda:0/1")),
        ("cuda:0/1,cuda:0/01", ("T005", "twice")),
    ],
)
def test_bad_parts_and_options_are_refused(text, words):
    with pytest.raises(TargetError) as caught:
        parse_devices(text)
    for word in words:
        assert word in str(caught.value)


def list_named(text):
    return [(spec.id, dict(spec.options)) for spec in parse_devices(text)]


def test_a_kind_with_cores_stands_for_all_processors_that_are_named():
    assert list_named("cpu:0,cpu:2,cpu") == [("cpu:0", {}), ("cpu:2", {}), ("cpu:0-2", {})]
    assert list_named("cpu{threads=2}") == [("cpu:0", {"threads": "2"})]
    address = Device("cpu:00-03", 1).address
    assert (address.index, address.last, address.id) == (0, 3, "cpu:0-3")


def test_a_device_that_is_named_again_with_options_is_another_way_to_use_it():
    _, (variant, options) = list_named("cuda:0,cuda:0{provider=tensorrt}")
    assert (variant, options) == ("cuda:0/tensorrt", {"provider": "tensorrt"})
    address = Device(variant, 1, options=options).address
    assert (address.index, address.part, address.id) == (0, "tensorrt", variant)


def test_options_of_a_provider_are_taken_as_they_are():
    text = 'cuda:0{option.a={"CPU": {"X": "}", "Y": 1}},option.b=2},cpu:0'
    assert list_named(text)[0] == ("cuda:0", {"option.a": '{"CPU": {"X": "}", "Y": 1}}', "option.b": "2"})
    device = Device("cuda:0", 1, model="H100", options={"option.b": "2"})
    assert device.cost_class == "cuda/H100/b=2"


def test_devices_share_processors_by_name_on_their_host():
    devices = (
        Device("a/cpu:0", 1),
        Device("a/cuda:0", 1, processors=("cpu:0",)),
        Device("b/cpu:0", 1, processors=("x", "y")),
        Device("b/cpu:1", 1, processors=("y",)),
    )
    target = Target(devices, (Link("all-to-all", "all-to-all", 0, 1),))
    assert target.processors.astype(int).tolist() == [[1, 0, 0], [1, 0, 0], [0, 1, 1], [0, 0, 1]]
    assert target.shares_processors
    assert not Target((Device("cpu:0", 1), Device("cpu:1", 1))).shares_processors


@pytest.mark.parametrize(
    ("pools", "words"),
    [
        ([Pool(("cpu:0", "cpu:2"), 1)], "unknown device: 'cpu:2'"),
        ([Pool(("cpu:0", "cpu:1"), 1)] * 2, "cpu:0 is in two pools"),
    ],
)
def test_a_pool_names_devices_of_the_target_once(pools, words):
    with pytest.raises(TargetError, match=words):
        Target((Device("cpu:0", 1), Device("cpu:1", 1)), pools=tuple(pools))
    with pytest.raises(TargetError, match="two or more"):
        Pool(("cpu:0",), 1)


def test_chosen_devices_keep_their_links_and_pools():
    devices = tuple(Device(f"cpu:{n}", 8) for n in range(3))
    target = Target(
        devices,
        (Link("cpu:0", "cpu:2", 1, 1), Link("cpu:0", "cpu:1", 1, 1)),
        pools=(Pool(("cpu:0", "cpu:1", "cpu:2"), 9),),
    )
    chosen = target.choose_devices(["cpu:2", "cpu:0"])
    assert [device.id for device in chosen.devices] == ["cpu:0", "cpu:2"]
    assert chosen.links == target.links[:1]
    assert chosen.pools == (Pool(("cpu:0", "cpu:2"), 9),)


def test_options_are_part_of_the_cost_class_unless_they_are_the_default():
    plain = Device("cuda:0", 1, model="H100")
    assert replace(plain, options={"provider": "cuda"}).cost_class == plain.cost_class == "cuda/H100"
    assert replace(plain, options={"provider": "tensorrt"}).cost_class == "cuda/H100/tensorrt"
    npu = Device("qnn/npu:0", 1, model="NPU", options={"fallback": "true"})
    assert npu.cost_class == "qnn/npu/NPU/fallback"
    assert replace(npu, options={"fallback": "false"}).cost_class == "qnn/npu/NPU"
    assert Device("cuda:0/1", 1, model="H100").cost_class == plain.cost_class
    assert replace(plain, options={"isolate": "true"}).cost_class == plain.cost_class, "nodes cost the same there"
    with pytest.raises(TargetError, match=r"T005.*cuda:0 has no option 'graph'"):
        Device("cuda:0", 1, options={"graph": "true"})


def test_logical_devices_of_a_gpu_have_its_index_and_a_limit_each():
    address = Device("cuda:3/1", 1 << 30).address
    assert (address.kind, address.index, address.part, address.id) == ("cuda", 3, 1, "cuda:3/1")
    ((provider, options),) = find_kind("cuda").list_providers(address)
    assert provider == "CUDAExecutionProvider"
    assert (options["device_id"], options["gpu_mem_limit"]) == ("3", str(1 << 30))
    ((_, options),) = find_kind("cuda").list_providers(Device("cuda:3", 1 << 30).address)
    assert "gpu_mem_limit" not in options


def test_a_device_with_tensorrt_has_cuda_behind_it():
    address = Device("cuda:1", 1, options={"provider": "tensorrt"}).address
    providers = [name for name, _ in find_kind("cuda").list_providers(address)]
    assert providers == ["TensorrtExecutionProvider", "CUDAExecutionProvider"]


def list_options(text: str) -> list[dict[str, str]]:
    (spec,) = parse_devices(text)
    return [
        options for _, options in find_kind("cuda").list_providers(Device(spec.id, 1, options=spec.options).address)
    ]


def test_cuda_computes_float32_as_it_is_unless_another_type_is_asked_for():
    assert list_options("cuda:0")[0]["use_tf32"] == "0"
    assert list_options("cuda:0{precision=float32}") == list_options("cuda:0")
    assert list_options("cuda:0{precision=tf32}")[0]["use_tf32"] == "1"
    assert Device("cuda:0", 1).precision == "float32"
    assert Device("cuda:0", 1, options={"precision": "tf32"}).precision == "tf32"


@pytest.mark.parametrize(
    ("options", "precision", "half", "brain"),
    [
        ("", "tf32", "0", "0"),
        (",precision=float16", "float16", "1", "0"),
        (",precision=bfloat16", "bfloat16", "0", "1"),
    ],
)
def test_tensorrt_computes_in_shorter_types_when_asked(options, precision, half, brain):
    tensorrt, cuda = list_options(f"cuda:0{{provider=tensorrt{options}}}")
    assert (tensorrt["trt_fp16_enable"], tensorrt["trt_bf16_enable"], cuda["use_tf32"]) == (half, brain, "0")
    (spec,) = parse_devices(f"cuda:0{{provider=tensorrt{options}}}")
    assert Device(spec.id, 1, options=spec.options).precision == precision


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("cuda:0{precision=float16}", "float32, tf32"),
        ("cuda:0{precision=float16,provider=cuda}", "float32, tf32"),
        ("cuda:0{precision=float32,provider=tensorrt}", "tf32, float16, bfloat16"),
        ("cuda:0{provider=tensorrt,precision=int8}", "tf32, float16, bfloat16"),
        ("openvino/cpu:0{precision=float16}", "float32, bfloat16"),
        ("migraphx/gpu:0{precision=bfloat16}", "float32, float16"),
    ],
)
def test_a_precision_that_a_provider_does_not_have_is_refused_with_those_that_it_has(text, values):
    with pytest.raises(TargetError, match=f"expected one of {values} for precision, got ") as caught:
        parse_devices(text)
    assert caught.value.code == "T005"


def test_a_target_file_keeps_what_devices_were_found_to_compute_in(tmp_path):
    target = Target((Device("cuda:0", 1, computes_in="tf32"), Device("cuda:1", 1)))
    (tmp_path / "t.toml").write_text(format_target(target))
    assert read_target(tmp_path / "t.toml") == target
    assert [device.precision for device in target.devices] == ["tf32", "float32"]
    with pytest.raises(TargetError, match=r"T007.*expected one of float32, tf32, .* for computes_in, got 'half'"):
        Device("cuda:0", 1, computes_in="half")


def test_a_target_file_keeps_options(tmp_path):
    target = Target((Device("cuda:0", 1, options={"provider": "tensorrt"}), Device("cuda:1/0", 1), Device("cpu:0", 1)))
    (tmp_path / "t.toml").write_text(format_target(target))
    assert read_target(tmp_path / "t.toml") == target


def test_options_in_a_target_file_may_be_numbers_and_tables(tmp_path):
    path = tmp_path / "target.toml"
    path.write_text(
        """[[devices]]
id = "openvino/cpu:0"
memory_bytes = 1024
[devices.options]
threads = 1
isolate = true
"option.load_config" = {CPU = {NUM_STREAMS = "1"}}
"""
    )
    options = read_target(path).devices[0].options
    assert options == {"threads": "1", "isolate": "true", "option.load_config": '{"CPU": {"NUM_STREAMS": "1"}}'}
    path.write_text(path.read_text().replace("threads = 1", "threads = 0.5"))
    with pytest.raises(TargetError, match=r"expected a number of 1 to 65536 threads, got '0.5'"):
        read_target(path)


def test_links_of_unlike_devices_are_as_slow_as_the_slower_kind():
    cpu, gpu, web = Device("cpu:0", 1), Device("cuda:0", 1), Device("webgpu:0", 1)
    assert default_link(gpu, cpu).latency_seconds == default_link(cpu, gpu).latency_seconds == 20e-6
    assert default_link(gpu, web).latency_seconds == default_link(web, cpu).latency_seconds == 200e-6
    assert default_link(gpu, web).bytes_per_second == default_link(web, cpu).bytes_per_second == 4e9


def test_a_device_has_a_kind_an_index_and_a_cost_class():
    cpu, gpu = Device("cpu:3", 1, cores=2), Device("cuda:1", 1, model="Imaginary 9000")
    assert (cpu.kind, cpu.address.index, cpu.cost_class) == ("cpu", 3, "cpu/2")
    assert (gpu.kind, gpu.address.index, gpu.cost_class) == ("cuda", 1, "cuda/Imaginary 9000")
    assert Device("cuda:0", 1).cost_class == "cuda/unknown"


# ---------------------------------------------------------------------------------------------- memory


@given(st.integers(0, 2**53 - 1), st.sampled_from(["", "B", " b"]))
def test_plain_bytes_are_parsed_exactly(amount, unit):
    assert parse_bytes(f"{amount}{unit}") == amount


@given(st.integers(0, 4096), st.sampled_from([("K", 10, 3), ("M", 10, 6), ("G", 10, 9), ("KI", 2, 10), ("MI", 2, 20)]))
def test_units_are_decimal_or_binary_whatever_their_case(amount, unit):
    name, base, power = unit
    expected = amount * base**power
    assert parse_bytes(f"{amount}{name}B") == parse_bytes(f" {amount} {name.lower()}b ") == expected


def test_fractions_of_a_unit_are_parsed():
    assert parse_bytes("1.5GiB") == 3 * 2**29
    assert parse_bytes(".5k") == 500


@pytest.mark.parametrize("text", ["", "lots", "-1", "1e9", "16 GiBs", "1,5GiB", "GiB", "0x10", "1.2.3", "inf"])
def test_an_invalid_amount_of_memory_is_refused(text):
    with pytest.raises(UsageError, match=r"write it as 16GiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


def test_the_letter_b_of_a_unit_may_be_left_out():
    assert [parse_bytes(f"1{unit}") for unit in "kmgt"] == [10**3, 10**6, 10**9, 10**12]


@given(id_lists, st.integers(0, 10**12))
def test_one_amount_is_for_every_device(ids, amount):
    assert parse_memory(str(amount), ids) == dict.fromkeys(ids, amount)


@given(id_lists, st.data())
def test_amounts_by_device_are_parsed(ids, data):
    limits = {name: data.draw(st.integers(0, 10**12)) for name in data.draw(st.sets(st.sampled_from(ids), min_size=1))}
    assert parse_memory(", ".join(f"{name}={limit}" for name, limit in limits.items()), ids) == limits


def test_a_limit_for_an_unknown_device_offers_the_nearest():
    with pytest.raises(TargetError, match=r"'cpu:11'(.|\n)*did you mean 'cpu:1'"):
        parse_memory("cpu:11=1GiB", ["cpu:0", "cpu:1"])


@given(targets(), st.data())
def test_limiting_changes_only_the_memory_of_the_named_device(target, data):
    name = data.draw(st.sampled_from([device.id for device in target.devices]))
    limited = target.limiting({name: 12345})
    for before, after in zip(target.devices, limited.devices):
        assert after.memory_bytes == (12345 if before.id == name else before.memory_bytes)
        assert (after.id, after.cores, after.model) == (before.id, before.cores, before.model)
    assert (limited.links, limited.link_model) == (target.links, target.link_model)


def test_limiting_an_unknown_device_is_refused():
    with pytest.raises(TargetError, match="did you mean 'cpu:0'"):
        Target((Device("cpu:0", 1),)).limiting({"cpu:1": 1})


# ---------------------------------------------------------------------------------------------- targets


def test_a_target_without_devices_is_refused():
    with pytest.raises(TargetError, match="empty"):
        Target(())


def test_a_target_with_a_repeated_device_is_refused():
    with pytest.raises(TargetError, match="twice"):
        Target((Device("cpu:0", 1), Device("cpu:0", 2)))


def test_a_link_to_an_unknown_device_is_refused_with_the_nearest():
    with pytest.raises(TargetError, match=r"'cpu:2'(.|\n)*did you mean 'cpu:"):
        Target((Device("cpu:0", 1), Device("cpu:1", 1)), (Link("cpu:0", "cpu:2", 0.0, 1.0),))


@given(targets())
def test_positions_follow_the_order_of_devices(target):
    assert [target.position(device.id) for device in target.devices] == list(range(len(target.devices)))
    with pytest.raises(TargetError, match="no device"):
        target.position("tpu:0")


@given(targets())
def test_link_arrays_hold_given_links_and_defaults_elsewhere(target):
    latency, per_byte = target.link_arrays()
    assert not latency.diagonal().any()
    assert not per_byte.diagonal().any()
    given_links = {(link.source, link.destination): link for link in target.links}
    for i, source in enumerate(target.devices):
        for j, destination in enumerate(target.devices):
            if i != j:
                link = given_links.get((source.id, destination.id)) or default_link(source, destination)
                assert latency[i, j] == link.latency_seconds
                assert per_byte[i, j] == 1 / link.bytes_per_second


def test_the_links_of_a_target_are_built_once_and_cannot_be_changed(monkeypatch):
    built = []
    monkeypatch.setattr("onnxplace.target.target.default_link", lambda *ends: built.append(ends) or default_link(*ends))
    target = Target(tuple(Device(f"cpu:{index}", 1 << 30) for index in range(8)))
    for _ in range(3):
        latency, per_byte = target.link_arrays()
        assert latency.sum() > 0
        latency[:], per_byte[:] = 0, 0
    assert len(built) == 8 * 7


# ---------------------------------------------------------------------------------------------- files


@given(targets())
def test_a_written_target_is_read_back_with_the_same_meaning(tmp_path_factory, target):
    path = tmp_path_factory.getbasetemp() / "target.toml"
    path.write_text(format_target(target), encoding="utf-8")
    reread = read_target(path)
    assert reread.devices == target.devices
    assert reread.link_model == target.link_model
    for written, read in zip(target.link_arrays(), reread.link_arrays()):
        np.testing.assert_allclose(written, read, rtol=1e-12)


def test_a_written_target_is_read_back_equal(tmp_path):
    target = Target((Device("cpu:0", 1), Device("cpu:1", 1)))
    (tmp_path / "target.toml").write_text(format_target(target), encoding="utf-8")
    assert read_target(tmp_path / "target.toml") == target


@pytest.mark.parametrize("name", ['24" display card', "C:\\gpu", "two\nlines"])
def test_any_hardware_name_is_read_back(tmp_path, name):
    target = Target((Device("cuda:0", 1, model=name),))
    (tmp_path / "target.toml").write_text(format_target(target), encoding="utf-8")
    assert read_target(tmp_path / "target.toml").devices == target.devices


def test_a_target_file_needs_only_ids_and_memory(tmp_path):
    path = tmp_path / "target.toml"
    path.write_text('[[devices]]\nid = "cuda:0"\nmemory_bytes = 1000\n[[devices]]\nid = "cpu:0"\nmemory_bytes = 2000\n')
    assert read_target(path) == Target((Device("cuda:0", 1000), Device("cpu:0", 2000)))


@pytest.mark.parametrize(
    "data", [b"x = ", b"\xff\xfe", b'[[devices]]\nid = "tpu:0"\nmemory_bytes = 1\n', b"devices = 3"]
)
def test_an_invalid_target_file_is_refused(tmp_path, data):
    path = tmp_path / "target.toml"
    path.write_bytes(data)
    with pytest.raises(TargetError):
        read_target(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TargetError, match=r"nowhere\.toml"):
        read_target(tmp_path / "nowhere.toml")


def device_entry(name: str) -> str:
    return f'[[devices]]\nid = "{name}"\nmemory_bytes = 80000000000\n'


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ('source = "cpu:0"\ndestination = "cpu:7"', ("target.toml", "'cpu:7'", "did you mean 'cpu:")),
        ('source = "cpu:0"\ndestination = "cpu:1"', ("target.toml", "links.0.latency_seconds")),
        ('destination = "cpu:1"', ("target.toml", "links.0.source")),
        ('source = "cpu:0"\nto = "cpu:1"', ("target.toml", "'to'")),
    ],
)
def test_an_incomplete_link_is_named_with_its_file(tmp_path, link, expected):
    figures = "latency_seconds = 1e-5\nbytes_per_second = 1e10\n" if "cpu:7" in link else "bytes_per_second = 1e10\n"
    path = tmp_path / "target.toml"
    path.write_text(f"{device_entry('cpu:0')}{device_entry('cpu:1')}[[links]]\n{link}\n{figures}", encoding="utf-8")
    with pytest.raises(TargetError) as caught:
        read_target(path)
    for words in expected:
        assert words in str(caught.value)


def test_a_pair_without_a_link_in_the_file_gets_the_default_link(tmp_path):
    path = tmp_path / "target.toml"
    ends = 'source = "cpu:0"\ndestination = "cuda:0"'
    link = f"[[links]]\n{ends}\nlatency_seconds = 1.0\nbytes_per_second = 2.0\n"
    path.write_text(f"{device_entry('cpu:0')}{device_entry('cuda:0')}{link}", encoding="utf-8")
    target = read_target(path).with_all_links()
    forward, back = target.links
    assert (forward.latency_seconds, forward.bytes_per_second) == (1.0, 2.0)
    assert back == default_link(target.devices[1], target.devices[0])


# ---------------------------------------------------------------------------------------------- the commands


@pytest.mark.parametrize(
    ("command", "code"), [(["run"], 2), (["verify"], 2), (["bench"], 2), (["run", "--runtime", "simulated"], 0)]
)
def test_absent_devices_stop_only_commands_that_run_on_them(
    run_cli, monkeypatch, tmp_path, model_file, fast_pipeline, command, code
):
    monkeypatch.chdir(tmp_path)
    Path("target.toml").write_text(device_entry("cuda:97") + device_entry("cuda:98"), encoding="utf-8")
    options = ("--shape", "batch=2", "--target", "target.toml", "--pipeline", fast_pipeline, "-o", "absent.bundle")
    compiled = run_cli("compile", model_file, *options)
    assert compiled.code == 0, compiled.err
    result = run_cli(*command, "absent.bundle")
    assert result.code == code, result.err
    if code:
        assert result.err.startswith("error[T011] cuda:9")
        assert "hint: " in result.err
        assert "`onnxplace run --runtime simulated`" in result.err
        assert "Traceback" not in result.err


def test_a_missing_link_is_noted_when_other_links_are_given(run_cli, monkeypatch, tmp_path, model_file, fast_pipeline):
    monkeypatch.chdir(tmp_path)
    devices = device_entry("cpu:0") + device_entry("cpu:1")
    ends = 'source = "{}"\ndestination = "{}"\nlatency_seconds = 1e-5\nbytes_per_second = 1e10\n'
    links = [f"[[links]]\n{ends.format(*pair)}" for pair in (("cpu:0", "cpu:1"), ("cpu:1", "cpu:0"))]
    for count in range(3):
        Path("target.toml").write_text(devices + "".join(links[:count]), encoding="utf-8")
        options = ("--shape", "batch=2", "--target", "target.toml", "--pipeline", fast_pipeline, "--force")
        result = run_cli("compile", model_file, *options)
        assert result.code == 0, result.err
        assert ("note[T013] cpu:1 -> cpu:0: " in result.err) == (count == 1)


def test_processors_and_pools_are_read_and_written(tmp_path):
    text = """
[[devices]]
id = "cpu:0"
memory_bytes = 8
processor = "core0"
[[devices]]
id = "cpu:0-1"
memory_bytes = 8
processors = ["core0", "core1"]
options = {threads = "2"}
[[pools]]
devices = ["cpu:0", "cpu:0-1"]
memory_bytes = 12
"""
    path = tmp_path / "target.toml"
    path.write_text(text, encoding="utf-8")
    target = read_target(path)
    assert [device.processors for device in target.devices] == [("core0",), ("core0", "core1")]
    assert target.pools == (Pool(("cpu:0", "cpu:0-1"), 12),)
    for compact in (False, True):
        path.write_text(format_target(target, compact=compact), encoding="utf-8")
        assert read_target(path) == target


def test_limits_and_totals_count_pools_once():
    devices = tuple(Device(f"cpu:{index}", size) for index, size in enumerate((8, 20, 7, 1 << 60)))
    target = Target(devices, pools=(Pool(("cpu:0", "cpu:1"), 12),))
    assert target.limit_bytes.tolist() == [8, 12, 7, 1 << 60]
    assert target.pool_of.tolist() == [0, 0, 1, 1]
    assert target.choose_devices(("cpu:0", "cpu:1", "cpu:2")).total_bytes == 12 + 7
    assert Target(devices[:3]).total_bytes == 35
    # The limit of a device holds within its pool, which never has more than its devices may use.
    limited = target.choose_devices(("cpu:0", "cpu:1")).limiting({"cpu:0": 4, "cpu:1": 4})
    assert limited.total_bytes == 8
    assert limited.pools[0].memory_bytes == 12
    assert target.describe_memory().endswith("the pool of cpu:0 and cpu:1 (12 bytes)")
    assert target.pools[0].describe() == "cpu:0, cpu:1 share 12 B"


def test_the_target_with_a_pool_in_the_documentation_can_be_read(tmp_path):
    text = (Path(__file__).parents[2] / "docs/target.md").read_text(encoding="utf-8")
    block = text.split("## Shared processors and memory")[1].split("```toml\n")[1].split("```")[0]
    (tmp_path / "t.toml").write_text(block)
    target = read_target(tmp_path / "t.toml")
    assert [device.id for device in target.devices] == ["cpu:0", "cpu:1", "cpu:0-1", "cpu:0-1/half", "webgpu:0"]
    assert target.shares_processors
    assert target.processors[2:4].tolist() == [[True, True, False], [True, True, False]]
    assert target.total_bytes == target.pools[0].memory_bytes == 16 << 30
