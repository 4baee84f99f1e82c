"""Parsers of device ids, and of amounts of memory, as they are written on the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from onnxplace.errors import MAX_SHOWN, TargetError, UsageError, format_value, suggest_nearest
from onnxplace.target.device_kinds import PROVIDER_OPTION, THREADS
from onnxplace.target.hosts import require_host_name, require_hosts_on_all, split_host
from onnxplace.target.kind_table import SHORT_NAMES, find_kind, is_known_kind, list_kind_names
from onnxplace.target.limits import MAX_CORES, MAX_DEVICES, MAX_INDEX, MAX_MEMORY_BYTES, require_device_limit


@dataclass(frozen=True)
class DeviceSpec:
    """A device as the user names it: `cuda:0`, `cuda:0/1`, `cpu:0-3` or `cuda:0{provider=tensorrt}`."""

    id: str
    options: Mapping[str, str] = field(default_factory=dict)


def parse_device_id(text: str, where: str) -> str:
    """Return a device id in its canonical spelling; raises TargetError with the nearest kind.

    >>> parse_device_id("cpu:00", "--devices"), parse_device_id("node1/cpu:00", "a device")
    ('cpu:0', 'node1/cpu:0')
    """
    host, local_id = split_host(text)
    if local_id != text:
        require_host_name(host, f"{where} {text}")
        return f"{host}/{_parse_local_id(local_id, where)}"
    return _parse_local_id(text, where)


def _parse_local_id(text: str, where: str) -> str:
    """Return the id of a device on its host in its canonical spelling."""
    kind, _, number = text.partition(":")
    if not is_known_kind(kind):
        raise _unknown_device_error(text, kind, number, where)
    indices, slash, part = number.partition("/")
    index, dash, last = indices.partition("-")
    if not _is_number(index):
        hint = f"write {kind}:0 for the first one"
        raise TargetError("T005", f"device {text!r} has no index", where=where, hint=hint)
    numbers = [item.lstrip("0") or "0" for item in (index, last, part)]
    if any(len(item) > len(str(MAX_INDEX)) for item in numbers if _is_number(item)):
        message = f"expected an index of at most {MAX_INDEX}, got device {format_value(text)}"
        raise TargetError("T005", message, where=where)
    whole = f"{kind}:{numbers[0]}" + (f"-{numbers[1]}" if dash else "")
    if dash and not (find_kind(kind).has_cores and _is_number(last) and 0 < int(last) - int(index) < MAX_DEVICES):
        message = f"device {text!r} cannot be several processors"
        hint = f"write {kind}:{index}; cpu:0-3 is one of four, and {MAX_DEVICES} is the most"
        raise TargetError("T005", message, where=where, hint=hint)
    if slash and _VARIANT.fullmatch(part):
        return f"{whole}/{part}"
    if slash and not find_kind(kind).is_divisible:
        message = f"device {text!r} cannot be one of several on {kind}:{index}"
        raise TargetError("T005", message, where=where, hint=f"write {kind}:{index}, or further indices")
    if slash and not _is_number(part):
        hint = f"write {kind}:{index}/0 for the first logical device of {kind}:{index}"
        raise TargetError("T005", f"device {text!r} has no number after the slash", where=where, hint=hint)
    return whole + (f"/{numbers[2]}" if slash else "")


# What follows the slash in the id of a device that is another way to use the same hardware: `cuda:0/tf32`.
_VARIANT = re.compile(r"[a-z][a-z0-9_.-]{0,63}")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _unknown_device_error(text: str, kind: str, index: str, where: str) -> TargetError:
    if match := re.fullmatch(r"([A-Za-z]+)([0-9]+)", text):  # the colon is missing
        kind, index = match.groups()
    number = index if _is_number(index) else "0"
    # Options name devices of this machine; files have whole names.
    names = (*list_kind_names(), *(SHORT_NAMES if where.startswith("--") else ()))
    hint = suggest_nearest(f"{kind}:{number}", [f"{known}:{number}" for known in names])
    hint += " (devices are written kind:index, such as cpu:0)"
    if _is_number(text):
        hint = "name each device, as in cpu:0,cpu:1 or cuda:0,cuda:1"
    return TargetError("T005", f"unknown device {text!r}", where=where, hint=hint)


def parse_device_spec(text: str, where: str = "--devices") -> DeviceSpec:
    """Parse a device with its options; raises TargetError that names the bad part.

    >>> parse_device_spec("cuda:0{provider=tensorrt}")
    DeviceSpec(id='cuda:0', options={'provider': 'tensorrt'})
    """
    name, brace, rest = text.partition("{")
    device_id = parse_device_id(name.strip(), where)
    if not brace:
        return DeviceSpec(device_id)
    if not rest.endswith("}"):
        hint = f"write {device_id}{{name=value}}"
        raise TargetError("T005", f"the options of device {text!r} have no end", where=where, hint=hint)
    options = {}
    for item in filter(None, map(str.strip, _split(rest[:-1]))):
        key, equals, value = item.partition("=")
        if not equals or key.strip() in options:
            message = f"expected options as name=value, each once, got {format_value(item)}"
            raise TargetError("T005", message, where=f"{where} {text}")
        options[key.strip()] = value.strip()
    require_device_options(device_id, options, f"{where} {text}")
    return DeviceSpec(device_id, options)


def require_device_options(device_id: str, options: Mapping[str, str], where: str) -> None:
    """Raise TargetError unless a device of this kind has these options with these values."""
    kind = find_kind(split_host(device_id)[1].partition(":")[0])
    allowed = kind.options
    for name, value in options.items():
        if name.startswith(PROVIDER_OPTION) and not kind.is_host:
            continue  # only the provider knows them; opening it checks them
        if name == THREADS and kind.has_cores:
            if not _is_number(value) or not 0 < int(value[: len(str(MAX_CORES)) + 1]) <= MAX_CORES:
                message = f"expected a number of 1 to {MAX_CORES} threads, got {format_value(value)}"
                raise TargetError("T005", message, where=where)
            continue
        if name not in allowed:
            message = f"{device_id} has no option {format_value(name)}"
            hint = suggest_nearest(name, allowed)
            hint += "" if kind.is_host else f"; one of its provider's own is written {PROVIDER_OPTION}{name}"
            raise TargetError("T005", message, where=where, hint=hint)
        values = kind.list_values(name, options)
        if value not in values:
            message = f"expected one of {', '.join(values)} for {name}, got {format_value(value)}"
            raise TargetError("T005", message, where=where, hint=suggest_nearest(str(value), values))


def parse_devices(text: str | Sequence[str], where: str = "--devices") -> tuple[DeviceSpec, ...]:
    """Parse `cuda:0{provider=tensorrt},cpu:1` into devices; raises TargetError that names the bad one.

    >>> [device.id for device in parse_devices("cuda:0, cpu:1")]
    ['cuda:0', 'cpu:1']
    """
    items = _split(text) if isinstance(text, str) else list(text)
    items = [item.strip() for item in items if item.strip()]
    require_device_limit(len(items), where)
    devices = _name_variants([parse_device_spec(item, where) for item in _write_spans(items)])
    ids = [device.id for device in devices]
    if not ids:
        raise TargetError("T005", "the list of devices is empty", where=where, hint="try --devices cpu:0,cpu:1")
    if len(set(ids)) < len(ids):
        raise TargetError(
            "T005", "a device is named twice", where=f"{where} {','.join(ids)}", hint="name each device once"
        )
    require_hosts_on_all(ids, where)
    _require_whole_or_parts(ids, where)
    return devices


def _split(text: str) -> list[str]:
    """Return the parts of a text between the commas that are in no braces, brackets and quotes.

    >>> _split('a{b={"c": 1, "d": "}"},e=1},f')
    ['a{b={"c": 1, "d": "}"},e=1}', 'f']
    """
    pieces = re.findall(r'"(?:[^"\\]|\\.)*"|.', text, re.DOTALL)
    parts, depth = [""], 0
    for piece in pieces:
        depth += (piece in ("{", "[")) - (piece in ("}", "]"))
        if piece == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _write_spans(items: Sequence[str]) -> list[str]:
    """Return the texts of devices, with `cpu` as all processors of the list: `cpu:0-1` beside `cpu:0,cpu:1`."""
    named = [re.match(r"[^{]*:([0-9]{1,6})(?:-([0-9]{1,6}))?", item) for item in items]
    # The others may be GPUs: only devices with cores have processors of these numbers.
    numbers = [int(n) for m in named if m and _has_cores(m[0].partition(":")[0]) for n in m.groups() if n] or [0]
    span = str(min(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)}-{max(numbers)}"
    return [re.sub(r"^([^:{]+)", rf"\1:{span}", item) if _has_cores(item.partition("{")[0]) else item for item in items]


def _has_cores(name: str) -> bool:
    return ":" not in name and is_known_kind(name) and name not in SHORT_NAMES and find_kind(name).has_cores


def _name_variants(devices: Sequence[DeviceSpec]) -> tuple[DeviceSpec, ...]:
    """Return devices of which those that are named again, with other options, are called after these.

    >>> _name_variants([DeviceSpec("cuda:0"), DeviceSpec("cuda:0", {"precision": "tf32"})])[1].id
    'cuda:0/tf32'
    """
    named = list[DeviceSpec]()
    for device in devices:
        twins = [item for item in named if name_whole(item.id) == device.id]
        if twins and all(item.options != device.options for item in twins):
            device = replace(device, id=name_variant(device.id, device.options))
        named.append(device)
    return tuple(named)


def name_variant(device_id: str, options: Mapping[str, str]) -> str:
    """Return the id of a device as another way to use the same hardware, after its options.

    >>> name_variant("openvino/cpu:0", {"precision": "bfloat16"}), name_variant("cpu:0", {"isolate": "true"})
    ('openvino/cpu:0/bfloat16', 'cpu:0/isolate')
    """
    words = [name if value == "true" else value for name, value in options.items()]
    text = re.sub(r"[^a-z0-9_.-]+", "-", "-".join(words).lower()).strip("-.") or "plain"
    return f"{device_id}/{text if text[0].isalpha() else f'with-{text}'}"[: len(device_id) + 60]


def name_whole(device_id: str) -> str:
    """Return the id of the hardware of a device, of which it may be a part or another way to use it.

    >>> name_whole("openvino/cpu:0/bfloat16"), name_whole("cuda:0")
    ('openvino/cpu:0', 'cuda:0')
    """
    kind, colon, number = device_id.rpartition(":")
    return kind + colon + number.partition("/")[0]


def _require_whole_or_parts(ids: Sequence[str], where: str) -> None:
    """Raise TargetError if a device is named both as a whole and in parts."""
    for device_id in ids:
        whole = name_whole(device_id)
        if whole != device_id and whole in ids and _is_number(device_id[len(whole) + 1 :]):
            message = f"{whole} is named as a whole and in parts"
            hint = f"name either {whole}, or its parts {whole}/0,{whole}/1"
            raise TargetError("T005", message, where=f"{where} {','.join(ids)}", hint=hint)


# Lower-case unit -> bytes: decimal ones, and binary ones with an i.
_UNIT_BYTES = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", 1)
    for ending, base in (("", 1000), ("b", 1000), ("ib", 1024))
}


def parse_bytes(text: str) -> int:
    """Parse an amount of memory such as `16GiB`, `500MB` or `1024`.

    >>> parse_bytes("1.5KiB")
    1536
    """
    hint = "write it as 16GiB, 500MB or 1048576"
    # Texts that are too long to be shown are no amounts; matching them could take long.
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text if len(text) <= MAX_SHOWN else "")
    if not match or match[2].lower() not in _UNIT_BYTES:
        raise UsageError("U005", f"expected an amount of memory, got {format_value(text)}", hint=hint)
    amount = float(match[1]) * _UNIT_BYTES[match[2].lower()]
    if amount > MAX_MEMORY_BYTES:
        raise UsageError("U005", f"expected at most 2**60 bytes of memory, got {text!r}", hint=hint)
    return int(amount)


def parse_memory(text: str, device_ids: Iterable[str]) -> dict[str, int]:
    """Parse `16GiB` (every device) or `cuda:0=16GiB,cpu:0=64GiB` into bytes by device id.

    >>> parse_memory("1KiB", ["cpu:0", "cpu:1"])
    {'cpu:0': 1024, 'cpu:1': 1024}
    """
    ids = list(device_ids)
    if "=" not in text:
        return dict.fromkeys(ids, parse_bytes(text))
    limits: dict[str, int] = {}
    for item in text.split(","):
        device_id, _, amount = item.strip().partition("=")
        if device_id not in ids:
            message = f"no device {device_id!r} to limit"
            raise TargetError("T005", message, where="--max-memory", hint=suggest_nearest(device_id, ids))
        if device_id in limits:
            raise TargetError(
                "T005", f"{device_id} is limited twice", where="--max-memory", hint="name each device once"
            )
        limits[device_id] = parse_bytes(amount)
    return limits
