"""Lists of hosts: with commas, as Slurm writes them, and in files."""

import pytest

from onnxplace.errors import InputError, TargetError, UsageError
from onnxplace_hosts.host_lists import parse_hosts, parse_slots


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1,node2", "node1 node2"),
        (" node2 , node1 ,", "node2 node1"),
        ("node[1-3]", "node1 node2 node3"),
        ("node[008-010,7],gpu.example.org", "node008 node009 node010 node7 gpu.example.org"),
        ("rack[1,2]-a,10.0.0.[1-2]", "rack1-a rack2-a 10.0.0.1 10.0.0.2"),
        ("node1:2,node[2-3]:1", "node1 node2 node3"),
        ("n[1-64]", " ".join(f"n{index}" for index in range(1, 65))),
    ],
)
def test_lists_of_hosts_are_expanded_in_order(text, names):
    assert parse_hosts(text) == tuple(names.split())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("K001", "expected two or more hosts", '`hosts="node1,node2"`')),
        ("node1", ("K001", "got 'node1'")),
        ("localhost:2", ("K001", "got 'localhost:2'", "`onnxplace devices --calibrate`")),
        ("node1,node1", ("K001", "'node1' is named twice")),
        ("node[1-2],node1", ("K001", "'node1' is named twice")),
        ("node1,Node2", ("T005", "'Node2'", "lower-case")),
        ("node1,-oProxyCommand=x", ("T005",)),
        ("node[1-65]", ("K001", "at most 64 hosts")),
        ("node[1-999999999]", ("K001", "at most 64 hosts")),
        ("node[3-1]", ("K001", "ascending ranges", "'node[3-1]'")),
        ("node[1-]", ("K001", "ascending ranges")),
        ("node[a]", ("K001", "one pair of brackets")),
        ("node[1][2]", ("K001", "one pair of brackets")),
        ("node[1", ("K001", "one pair of brackets")),
        ("node1,node]", ("K001", "one pair of brackets")),
    ],
)
def test_bad_lists_of_hosts_are_refused(text, words):
    with pytest.raises((UsageError, TargetError)) as caught:
        parse_hosts(text)
    for word in words:
        assert word in str(caught.value)


def test_hostfiles_of_both_mpis_are_read(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("# our hosts\nnode1\n\nnode2 slots=4\nnode3:2  # the third\n")
    assert parse_hosts(f"@{path}") == ("node1", "node2", "node3")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"node1 node2\n", ("K001", "hostfile, line 1", "got 'node1 node2'")),
        (b"node1\nnode2 slots=many\n", ("K001", "hostfile, line 2")),
        (b"\xff\xfe", ("K001", "not a hostfile: it is a binary file")),
        (b"node1\n", ("K001", "expected two or more hosts")),
        (None, ("K001", "hostfile")),
    ],
)
def test_bad_hostfiles_are_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / "hostfile").write_bytes(content)
    with pytest.raises(InputError) as caught:
        parse_hosts(f"@{tmp_path}/hostfile")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("localhost:2", {"localhost": 2}),
        ("node1:1,node2", {"node1": 1, "node2": None}),
        ("node[1-2]:3", {"node1": 3, "node2": 3}),
    ],
)
def test_hosts_may_have_numbers_of_slots(text, slots):
    assert {host.name: host.slots for host in parse_slots(text)} == slots


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("node[1-999999999]", "expected 1 to 64 hosts, got 'node[1-999999999]'"),
        ("node1:" + "9" * 5000, "expected a number of devices from 1 to 1024"),
        ("node1:\u0663", "expected a number of devices from 1 to 1024"),
        ("node1," * 20000, "'node1' is named twice"),
        ("[" * 60000 + "," * 60000, "expected one pair of brackets"),
    ],
    ids=["range", "digits", "other digits", "many", "brackets"],
)
def test_lists_that_would_take_forever_are_refused_at_once(text, words):
    with pytest.raises(UsageError, match="K001") as caught:
        parse_slots(text)
    assert words in str(caught.value)


def test_slots_of_a_hostfile_are_read_as_mpich_and_open_mpi_write_them(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("node1 slots=2  # Open MPI\nnode2:3\nnode3\n")
    assert {host.name: host.slots for host in parse_slots(f"@{path}")} == {"node1": 2, "node2": 3, "node3": None}
    assert parse_hosts(f"@{path}") == ("node1", "node2", "node3")
