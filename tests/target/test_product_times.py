"""Times of matrix products by coefficients of a device."""

import math

import pytest
from hypothesis import given, strategies as st

from onnxplace.errors import TargetError
from onnxplace.target.catalogue import read_catalogue
from onnxplace.target.product_times import ProductTimes
from onnxplace.target.target import Device, Target
from onnxplace.target.target_file import format_target, read_target

TIMES = ProductTimes(2e-6, 4e-6, 1000.0, 0.8, 0.9, 2.0)
MEASURED = [(item, kind, times) for item in read_catalogue().devices.values() for kind, times in item.products.items()]

seconds = st.floats(0, 1e3)
depths = st.integers(0, 1 << 20)
coefficients = st.builds(
    ProductTimes,
    launch_seconds=st.floats(0, 1e-3),
    ramp_seconds=st.floats(0, 1e-3),
    ramp_length=st.floats(1, 1e6),
    compute_share=st.floats(1e-3, 1),
    memory_share=st.floats(1e-3, 1),
    sharpness=st.floats(1, 20),
)


@given(coefficients, seconds, seconds, depths)
def test_a_product_takes_no_less_than_the_peak_rates_allow(times, computing, moving, depth):
    assert times.seconds(computing, moving, depth) >= max(computing, moving)


@given(coefficients, seconds, seconds, depths, st.floats(1, 10), st.sampled_from(range(3)))
def test_a_product_that_grows_in_any_size_takes_no_less(times, computing, moving, depth, factor, grown):
    sizes = [computing, moving, depth]
    smaller = times.seconds(*sizes)
    sizes[grown] *= factor
    assert times.seconds(*sizes) >= smaller * (1 - 1e-12)


def test_the_parts_of_a_product_are_those_of_the_formula():
    assert TIMES.seconds(0.0, 0.0, 0) == 2e-6
    assert TIMES.seconds(0.0, 0.0, 1000) == pytest.approx(2e-6 + 2e-6)
    assert TIMES.seconds(0.0, 0.0, 10**9) == pytest.approx(2e-6 + 4e-6)
    assert TIMES.seconds(0.8, 0.0, 0) == pytest.approx(1 + 2e-6)
    assert TIMES.seconds(0.8, 0.9, 0) == pytest.approx(math.sqrt(2) + 2e-6)


def test_the_launch_of_a_device_that_takes_longer_than_the_measured_one_counts():
    assert TIMES.seconds(0.0, 0.0, 0, launch_seconds=5e-6) == 5e-6
    assert TIMES.seconds(0.0, 0.0, 0, launch_seconds=1e-6) == 2e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compute_share": 1.1}, "compute_share"),
        ({"memory_share": 0}, "memory_share"),
        ({"sharpness": 0.5}, "sharpness"),
        ({"launch_seconds": -1e-6}, "launch_seconds"),
        ({"ramp_length": math.nan}, "ramp_length"),
    ],
)
def test_coefficients_without_a_meaning_are_refused(change, message):
    fields = {**vars(TIMES), **change}
    with pytest.raises(TargetError, match=message):
        ProductTimes(**fields)


def test_a_type_without_rates_has_no_products():
    with pytest.raises(TargetError, match="there is no rate for 'float61'") as caught:
        Device("cuda:0", 1, products={"float61": TIMES})
    assert "float16" in caught.value.hint


@given(coefficients)
def test_coefficients_survive_a_target_file(tmp_path_factory, times):
    path = tmp_path_factory.getbasetemp() / "products.toml"
    target = Target((Device("cuda:0", 1 << 30, products={"float16": times, "bfloat16": TIMES}),))
    for compact in (False, True):
        path.write_text(format_target(target, compact=compact))
        assert read_target(path) == target


@pytest.mark.parametrize(
    ("products", "message"),
    [
        ("{float16 = {launch_seconds = 1e-6}}", "ramp_seconds"),
        ("{float16 = {launch_seconds = 1, ramp_seconds = 1, ramp_length = 1, compute_share = 2, memory_share = 1, "
         "sharpness = 1}}", "compute_share"),
        ("{float16 = 3}", "float16"),
        ("3", "products"),
    ],
)  # fmt: skip
def test_a_wrong_entry_of_a_target_file_is_named(tmp_path, products, message):
    path = tmp_path / "target.toml"
    path.write_text(f'[[devices]]\nid = "cuda:0"\nmemory_bytes = 1\nproducts = {products}\n')
    with pytest.raises(TargetError, match=message) as caught:
        read_target(path)
    assert caught.value.code == "T007"
    assert str(path) in caught.value.where


@pytest.mark.parametrize(("item", "kind", "times"), MEASURED, ids=[f"{item.name} {kind}" for item, kind, _ in MEASURED])
def test_measured_devices_of_the_catalogue_have_a_source_and_plausible_coefficients(item, kind, times):
    assert item.products_source
    assert kind in item.rates
    assert 1e-6 < times.launch_seconds < 5e-6
    assert 0.5 < times.compute_share < 0.9
    assert 0.7 < times.memory_share < 0.95
    # Large products run at the compute share, and rows by a large weight at the share of the memory.
    computing = 2 * 16384**3 / item.rates[kind]
    moving = 2 * 3 * 16384**2 / item.memory_bytes_per_second
    assert times.seconds(computing, moving, 16384) == pytest.approx(computing / times.compute_share, rel=0.15)
    moving = 2 * 16384**2 / item.memory_bytes_per_second
    assert times.seconds(computing / 16384, moving, 16384) == pytest.approx(moving / times.memory_share, rel=0.1)
