"""What a bundle's devices leave to the host or lack on this machine: nodes that they do not take, and cores."""

from __future__ import annotations

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.manifest import Manifest, SegmentRecord
from onnxplace.errors import Diagnostic, OnnxplaceError, format_count
from onnxplace.machine.hardware import available_cores, find_device_problem
from onnxplace.machine.isolated_sessions import list_taken_nodes, open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.target.kind_table import find_kind
from onnxplace.target.target import Device, Target, count_cores_by_processor


def report_host_nodes(bundle: Bundle) -> list[Diagnostic]:
    """Return a note for each device of this machine that leaves nodes of its segments to the host.

    Their results are right, but their time is not what was planned. Only providers that compile are asked, and not
    those that may leave nodes to the host (`fallback=true`). The compiled model of a segment lists them; without one, a
    session does.
    """
    notes = []
    for device in bundle.target.devices:
        records = [record for record in bundle.manifest.segments if record.device == device.id]
        is_asked = device.compiles and device.options.get("fallback") != "true"
        if not (records and is_asked) or find_device_problem(device):
            continue
        left = [node for record in records for node in _list_host_nodes(bundle, record, device)]
        if left:
            message = f"the host computes {format_count(len(left), 'node')} of its segments, such as {left[0]}"
            hint = f"measure the costs here; to allow it, and to count its time: {device.id}{{fallback=true}}"
            notes.append(Diagnostic("C007", message, where=device.id, hint=hint))
    return notes


def _list_host_nodes(bundle: Bundle, record: SegmentRecord, device: Device) -> list[str]:
    """Return the nodes of a segment, as operator and name, that its provider does not take."""
    file = (record.static or record).file  # the host computes other sizes, and notes that
    made_for = find_kind(device.kind).describe_compiler(device.address)
    for item in record.compiled:
        if item.made_for == made_for:  # its nodes of EPContext stand for those that are taken
            return [text for text in _list_nodes(bundle, item.files[0]).values() if not text.startswith("EPContext ")]
    entries = {**bundle.session_entries, "session.record_ep_graph_assignment_info": "1"}
    try:
        session = open_session(bundle.file(file), make_session_options([0], "none", entries), device.address, file)
    except OnnxplaceError:  # reported by the trial, or when the bundle is opened
        return []
    taken = list_taken_nodes(session, device.address)
    return [text for name, text in _list_nodes(bundle, file).items() if name not in taken]


def _list_nodes(bundle: Bundle, file: str) -> dict[str, str]:
    """Return operator and name of each node of a file, by its name."""
    import onnx

    nodes = onnx.load(bundle.file(file), load_external_data=False).graph.node
    return {node.name: f"{node.op_type} {node.name!r}" for node in nodes}


def find_core_shortage(manifest: Manifest) -> Diagnostic | None:
    """Return a note if a bundle's CPU devices have more cores than this machine, or None."""
    return report_core_shortage(manifest.target.target(), manifest.model)


def report_core_shortage(target: Target, model: str) -> Diagnostic | None:
    """Return a note if the devices of a target on processor cores have more cores than this machine, or None.

    Devices of several hosts do not run here.
    """
    needed, available = sum(count_cores_by_processor(target.devices).values()), len(available_cores())
    if target.hosts or needed <= available:
        return None
    message = f"its CPU devices have {needed} cores, this machine {available}: they compete for cores"
    return Diagnostic("F008", message, where=model)
