"""Files of arrays: the format's own library reads and writes the same; damage and full disks lose nothing."""

import errno
import json
from contextlib import suppress

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from onnxplace.errors import InputError, OnnxplaceError, UsageError
from onnxplace_training import array_files, write_arrays
from onnxplace_training.array_files import DTYPES

PLAIN = [name for name in DTYPES.values() if name != "bfloat16"]
HINT = "use another one"


def map_arrays(path, code="L041"):
    return array_files.map_arrays(path, code, HINT)


def write_file_of(header, body, path):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_files_are_those_of_the_formats_own_library(data, tmp_path_factory):
    file = tmp_path_factory.mktemp("file") / "a.safetensors"
    shapes = st.lists(st.integers(0, 3), max_size=3)
    names = data.draw(st.lists(st.text(min_size=1, max_size=5).filter(lambda text: text.isprintable()), unique=True))
    random = np.random.default_rng(0)
    arrays = {
        name: (random.random(data.draw(shapes)) * 3).astype(data.draw(st.sampled_from(PLAIN)))
        for name in names
        if name != "__metadata__"
    }
    write_arrays(file, arrays, {"key": "value"})
    other = load_file(file)
    found = map_arrays(file)
    assert found.metadata == {"key": "value"}
    for contents in (other, found.arrays):
        assert set(contents) == set(arrays)
        for name, array in arrays.items():
            assert contents[name].dtype == array.dtype
            np.testing.assert_array_equal(contents[name], array)
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, file)
    for name, array in map_arrays(file).arrays.items():
        np.testing.assert_array_equal(array, arrays[name])


def test_brain_floats_are_kept(tmp_path):
    array = np.array([1.5, -2], ml_dtypes.bfloat16)
    write_arrays(tmp_path / "a", {"x": array}, {})
    assert map_arrays(tmp_path / "a").arrays["x"].dtype == array.dtype
    np.testing.assert_array_equal(map_arrays(tmp_path / "a").arrays["x"], array)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 400]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 8]},
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
        {"shape": [2]},
        [],
        None,
    ],
)
def test_entries_that_do_not_fit_the_file_are_refused(entry, tmp_path):
    write_file_of({"x": entry}, bytes(8), tmp_path / "a")
    with pytest.raises(InputError, match=r"(?s)L041.*its entry for 'x' does not fit the file.*use another one"):
        map_arrays(tmp_path / "a")


@pytest.mark.parametrize(
    ("ranges", "size", "message"),
    [
        ([(0, 4), (0, 4)], 4, "its array 'b' begins at byte 0, expected 4"),
        ([(4, 8), (0, 4)], 12, "it has 12 bytes of arrays, expected 8"),
        ([(0, 4), (8, 12)], 12, "its array 'b' begins at byte 8, expected 4"),
        ([], 1, "it has 1 bytes of arrays, expected 0"),
    ],
)
def test_arrays_that_overlap_or_leave_a_gap_are_refused_as_the_formats_own_library_does(
    ranges, size, message, tmp_path
):
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": list(r)} for name, r in zip("ab", ranges)}
    write_file_of(header, bytes(size), tmp_path / "a")
    with pytest.raises(SafetensorError):
        load_file(tmp_path / "a")
    with pytest.raises(InputError, match=message):
        map_arrays(tmp_path / "a")


@pytest.mark.parametrize("data", [b"", b"GIF89a", bytes(64), b"{" * 100, bytes([2]) + bytes(7) + b"[]"])
def test_a_file_of_another_kind_is_named_as_such(data, tmp_path):
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(InputError, match=r"(?s)H003.*not a safetensors file.*use another one"):
        map_arrays(tmp_path / "a", "H003")


@pytest.mark.parametrize("metadata", [[], {"key": 1}])
def test_metadata_are_texts(metadata, tmp_path):
    write_file_of({"__metadata__": metadata}, b"", tmp_path / "a")
    with pytest.raises(InputError, match=r"H003.*its metadata is not a mapping of texts"):
        map_arrays(tmp_path / "a", "H003")


def test_numbers_of_the_other_byte_order_keep_their_value(tmp_path):
    write_arrays(tmp_path / "a", {"x": np.array([1, 2], ">i4")}, {})
    assert map_arrays(tmp_path / "a").arrays["x"].tolist() == [1, 2]


def test_a_type_that_the_format_does_not_have_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"U032.*'x' has the type complex64, expected one of float64"):
        write_arrays(tmp_path / "a", {"x": np.ones(2, np.complex64)}, {})
    assert not list(tmp_path.iterdir())


def test_every_changed_byte_is_noticed(tmp_path):
    file = tmp_path / "a"
    write_arrays(file, {"x": np.arange(3, dtype="f4"), "y": np.arange(3, dtype="i1")}, {"key": "value"})
    whole = file.read_bytes()
    assert map_arrays(file).has_hash
    unnoticed = set()
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1
        file.write_bytes(changed)
        with suppress(InputError):
            unnoticed.add(map_arrays(file).has_hash)
    assert unnoticed == {False}  # where the name of the hash itself is changed


def test_a_file_of_another_program_has_no_hash(tmp_path):
    save_file({"x": np.ones(3)}, tmp_path / "a")
    assert not map_arrays(tmp_path / "a").has_hash


def test_a_full_disk_leaves_the_older_file(tmp_path, monkeypatch):
    file = tmp_path / "a.safetensors"
    write_arrays(file, {"x": np.ones(3)}, {})

    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(array_files.os, "fsync", fail)
    with pytest.raises(OnnxplaceError, match=r"E001.*no space left"):
        write_arrays(file, {"x": np.zeros(3)}, {})
    assert map_arrays(file).arrays["x"].tolist() == [1, 1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
