"""Device maps in ONNX Runtime's words: layers of nodes, or parts of their names, and which provider has them.

They are read by ONNX Runtime's own rules (core/framework/layering_annotations.cc), so that a placement that ran there
is the same here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import NodeProto

from onnxplace.errors import Diagnostic, InputError, TargetError, UsageError, format_count, format_names, format_value
from onnxplace.facts import Profile
from onnxplace.graph.op_graph import Ints
from onnxplace.model.canonicalize import canonicalize
from onnxplace.model.device_metadata import DEVICE_KEY
from onnxplace.model.loading import parse_model, read_model_file
from onnxplace.model.model import Model
from onnxplace.state import State
from onnxplace.target.target import Target
from onnxplace.utils.files import format_path, parse_json, read_json
from onnxplace_formats.ort_layers import BY_LAYER, BY_NAME, LAYER_KEY, MODEL_FILE, SETTINGS_FILE
from onnxplace_formats.ort_providers import find_designated

_HINT = "write it like gpu(encoder);cpu(=decoder), as ONNX Runtime reads it"


@dataclass(frozen=True)
class LayerRule:
    """A layer, or a part of a name, that belongs to a device."""

    word: str
    """The device, in ONNX Runtime's words."""
    pattern: str
    is_exact: bool = False
    """Whether it is the whole layer, and not the beginning of one."""


def read_layer_map(source: str, state: State) -> tuple[Ints, list[Diagnostic]] | None:
    """Return the device that settings of ONNX Runtime pin each node to, -1 for none, and notes; None for other maps.

    Args:
        source: The path of a model whose nodes have layers, with `session_options.json` next to it; or that of a JSON
            file with one of the two settings, or its text.
        state: The state with the profile and the devices. Of JSON alone, the layers are those of its model, or of
            `model.onnx` next to the file.

    Raises:
        ModelError: The file is not a model.
        InputError: The settings are missing, or ONNX Runtime would not read them.
        TargetError: The target has no device that a rule names, or several.
        UsageError: No node has a layer or a name of the settings.
    """
    is_text = source.startswith("{")
    if source.lower().endswith(".onnx") and not is_text:
        path = Path(source)
        nodes, file = _read_nodes(path), path.with_name(SETTINGS_FILE)
        layers = list_layers(nodes)
        if not layers or (not file.exists() and _name_devices(nodes)):
            return None
        return _pin(_choose_settings(_read_settings(file), format_path(file)), layers, state, format_path(file))
    where = "device map" if is_text else source
    settings = (
        parse_json(source, "U023", "a device map", where) if is_text else read_json(source, "U023", "a device map")
    )
    if not isinstance(settings, dict) or not settings.keys() & {BY_LAYER, BY_NAME}:
        return None
    layers = list_layers(state[Model].nodes) if Model in state else {}
    if not layers and not is_text and (beside := Path(source).with_name(MODEL_FILE)).exists():
        layers = list_layers(_read_nodes(beside))
    return _pin(_choose_settings(settings, where), layers, state, where)


def _read_nodes(path: Path) -> Sequence[NodeProto]:
    """Return the nodes of a model under the names that `load` gives to them."""
    return canonicalize(parse_model(read_model_file(path), path), path.name, path.parent).nodes


def _name_devices(nodes: Sequence[NodeProto]) -> bool:
    """Return whether nodes name devices in words that onnxplace reads without ONNX Runtime's settings."""
    return any(
        node.device_configurations or any(entry.key == DEVICE_KEY for entry in node.metadata_props) for node in nodes
    )


def list_layers(nodes: Sequence[NodeProto]) -> dict[str, str]:
    """Return the layer of each node that has one, by name."""
    return {node.name: entry.value for node in nodes for entry in node.metadata_props if entry.key == LAYER_KEY}


def _read_settings(path: Path) -> Mapping[str, Any]:
    """Return the settings next to a model; raises InputError if there are none."""
    settings = read_json(path, "U023", "settings of ONNX Runtime") if path.exists() else None
    if isinstance(settings, dict) and settings.keys() & {BY_LAYER, BY_NAME}:
        return settings
    message = (
        f"the nodes of the model have layers, but no settings next to it say on which devices: expected {BY_LAYER}"
    )
    hint = f'write {path.name} next to the model, like {{"{BY_LAYER}": "gpu(encoder);cpu(decoder)"}}'
    raise InputError("U023", message, where=format_path(path), hint=hint)


def _choose_settings(settings: Mapping[str, Any], where: str) -> tuple[str, list[LayerRule]]:
    """Return the setting that is given, with its rules; raises InputError for two, and for none in it."""
    given = {key: settings[key] for key in (BY_LAYER, BY_NAME) if settings.get(key)}
    if len(given) != 1:
        message = f"expected either {BY_LAYER} or {BY_NAME}, got {'both' if given else 'neither'}"
        raise InputError("U023", message, where=where, hint="ONNX Runtime takes one of them")
    ((key, text),) = given.items()
    if not isinstance(text, str):
        raise InputError("U023", f"expected a text for {key}, got {format_value(text)}", where=where, hint=_HINT)
    return key, parse_rules(text, where, by_name=key == BY_NAME)


def parse_rules(text: str, where: str = "", *, by_name: bool = False) -> list[LayerRule]:
    """Return the rules of a setting; raises InputError where ONNX Runtime would refuse it.

    >>> parse_rules("gpu(encoder); cpu(=decoder)")[1]
    LayerRule(word='cpu', pattern='decoder', is_exact=True)
    """

    def refuse(reason: str, entry: str) -> InputError:
        return InputError("U023", f"{reason} in {entry!r}", where=where, hint=_HINT)

    rules: list[LayerRule] = []
    for entry in filter(None, map(str.strip, text.split(";"))):
        start, end = entry.find("("), entry.find(")")
        if start < 0 or end < start:
            raise refuse("expected the device, then patterns in parentheses,", entry)
        word = entry[:start].strip()
        if not word:
            raise refuse("expected a device before '('", entry)
        for item in map(str.strip, entry[start + 1 : end].split(",")):
            rule = LayerRule(word, item.removeprefix("=").strip(), item.startswith("="))
            if not rule.pattern:
                continue
            if by_name and rule.is_exact:
                raise refuse("names are matched by their parts, and '=' is not allowed", entry)
            if any((other.pattern, other.is_exact) == (rule.pattern, rule.is_exact) for other in rules):
                raise refuse(f"{item!r} is given twice, again", entry)
            rules.append(rule)
    return rules


def match_layer(rules: Sequence[LayerRule], layer: str) -> LayerRule | None:
    """Return the first rule whose pattern the layer begins with, else the one that it equals.

    >>> match_layer(parse_rules("npu(=enc1); gpu(enc)"), "enc1").word
    'gpu'
    """
    begun = (rule for rule in rules if not rule.is_exact and layer.startswith(rule.pattern))
    equal = (rule for rule in rules if rule.is_exact and layer == rule.pattern)
    return next(begun, None) or next(equal, None)


def match_name(rules: Sequence[LayerRule], name: str) -> LayerRule | None:
    """Return the rule with the longest pattern that is a part of the name, the first one of equal length.

    >>> match_name(parse_rules("gpu(layer); cpu(layer.1)"), "/layer.1/Add").word
    'cpu'
    """
    return max((rule for rule in rules if rule.pattern in name), key=lambda rule: len(rule.pattern), default=None)


def _pin(
    settings: tuple[str, Sequence[LayerRule]], layers: Mapping[str, str], state: State, where: str
) -> tuple[Ints, list[Diagnostic]]:
    """Return the device of each node by the rules, -1 for none, and a note."""
    key, rules = settings
    names = state[Profile].graph.names
    pinned: Ints = np.full(len(names), -1, dtype=np.int32)
    for index, device in _match_nodes(key, rules, layers, names, state.target, where):
        pinned[index] = device
    count = int((pinned >= 0).sum())
    what = "layer" if key == BY_LAYER else "name"
    if not count:
        known = dict.fromkeys(layers.values()) if key == BY_LAYER else names[:3]
        hint = f"{what}s here are {format_names(known)}" if known else f"nodes of this model have no {LAYER_KEY}"
        raise UsageError("U020", f"no node has a {what} of these settings", where=where, hint=hint)
    message = f"{what}s pin {format_count(count, 'node')} of {len(names)}; the others are free"
    return pinned, [Diagnostic("U025", message, where=where)]


def _match_nodes(
    key: str, rules: Sequence[LayerRule], layers: Mapping[str, str], names: Sequence[str], target: Target, where: str
) -> Iterator[tuple[int, int]]:
    """Yield nodes with their devices, both by position: by a rule, or where no rule matches, by the id in the layer."""
    ids = [device.id for device in target.devices]
    for index, name in enumerate(names):
        layer = layers.get(name, "")
        rule = match_name(rules, name) if key == BY_NAME else match_layer(rules, layer) if layer else None
        if rule is not None:
            yield index, _find_device(rule, layer, target, where)
        elif key == BY_LAYER and layer in ids:
            yield index, ids.index(layer)


def _find_device(rule: LayerRule, layer: str, target: Target, where: str) -> int:
    """Return the position of the device of a rule; of several ones, that whose id is the layer."""
    devices = target.devices
    candidates = find_designated(rule.word, devices)
    if len(candidates) > 1:
        candidates = [device for device in candidates if device.id == layer] or candidates
    if len(candidates) == 1:
        return devices.index(candidates[0])
    ids = [device.id for device in candidates]
    found = f"{rule.word!r} is one of {format_names(ids)}" if ids else f"no device {rule.word!r} in this target"
    hint = f"devices are {format_names((device.id for device in devices), quoted=False)}; give one that it fits"
    raise TargetError("T005", f"{found}, for {rule.pattern!r}", where=where, hint=hint)
