"""Policies of `hierarchical` and `go` on disk, as safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast, get_args

import numpy as np

from onnxplace.errors import format_value
from onnxplace.utils import write_arrays
from onnxplace_learned.policies.policy_tensors import (
    FORMAT,
    MAX_DEVICES,
    MAX_WIDTH,
    damaged_policy_error,
    newer_policy_error,
    open_policy,
    require_tensors,
)
from onnxplace_learned.sequences.sequence_graph import ListOrder
from onnxplace_learned.sequences.sequence_learner import SequenceLearner
from onnxplace_learned.sequences.sequence_policy import (
    ATTENTION_HEADS,
    VARIANTS,
    Kind,
    SequencePolicy,
    SequenceShape,
    Variant,
)

VERSION = 1
# Names of the moments of the optimiser and of the baselines in a checkpoint.
MOMENTS, BASELINES = ("adam.first", "adam.second"), "baselines"
# Far more groups, and graphs, than any useful policy has.
MAX_GROUPS, MAX_GRAPHS = 4096, 1 << 20


def write_sequence_policy(path: Path, policy: SequencePolicy, learner: SequenceLearner | None = None) -> None:
    """Write a policy; with a learner, also what its training can be resumed from.

    Raises UsageError or ExecutionError if the file cannot be written.
    """
    shape, tensors = policy.shape, policy.shape.split(policy.theta)
    if learner:
        tensors |= dict(zip(MOMENTS, (learner.first, learner.second)))
        tensors[BASELINES] = learner.baseline
    metadata = {
        "format": FORMAT,
        "kind": shape.kind,
        "version": VERSION,
        "variant": shape.variant,
        "devices": shape.devices,
        "groups": shape.groups,
        "width": shape.width,
        "order": shape.list_order,
        "family": policy.family,
        "graphs": policy.graphs,
        "updates": policy.updates,
        "seed": policy.seed,
    }
    write_arrays(path, tensors, {key: str(value) for key, value in metadata.items()})


def read_sequence_policy(path: Path, kind: Kind) -> SequencePolicy:
    """Return the policy of a kind in a file.

    Raises:
        InputError: The file cannot be read, is damaged, is not such a policy, or is of a newer version.
    """
    return read_sequence_learner(path, kind)[0]


def read_sequence_learner(path: Path, kind: Kind) -> tuple[SequencePolicy, SequenceLearner | None]:
    """Return the policy in a file, and the learner if it is a checkpoint."""
    file = open_policy(path, kind)
    tensors, policy = file.arrays, _read_description(file.metadata, path, kind)
    expected, parameters = policy.shape.sizes, policy.shape.parameters
    is_checkpoint = BASELINES in tensors
    moments = {**dict.fromkeys(MOMENTS, (parameters,)), BASELINES: (policy.graphs,)} if is_checkpoint else {}
    require_tensors(tensors, {**expected, **moments}, path, kind)
    # Copies, so that nothing refers to the file any more.
    theta = np.concatenate([tensors[name].ravel() for name in expected])
    policy = policy.with_parameters(theta, policy.updates)
    if not is_checkpoint:
        return policy, None
    return policy, SequenceLearner(policy, *(np.array(tensors[name]) for name in (*MOMENTS, BASELINES)))


def _read_description(metadata: Mapping[str, str], path: Path, kind: Kind) -> SequencePolicy:
    """Return a policy without parameters; raises InputError for one that this version does not know."""
    try:
        if metadata["kind"] != kind or int(metadata["version"]) > VERSION:
            raise newer_policy_error(path, kind, VERSION, metadata)
        sizes = {"devices": MAX_DEVICES, "groups": MAX_GROUPS, "width": MAX_WIDTH}
        numbers = {key: int(metadata[key]) for key in (*sizes, "graphs", "updates", "seed")}
        if any(not 1 <= numbers[key] <= limit for key, limit in sizes.items()) or min(numbers.values()) < 0:
            raise ValueError(f"its sizes are {numbers}")
        if numbers["width"] % ATTENTION_HEADS or numbers["graphs"] > MAX_GRAPHS:
            raise ValueError(f"its sizes are {numbers}")
        variant, order, family = (metadata[key] for key in ("variant", "order", "family"))
        if variant not in VARIANTS[kind]:
            raise ValueError(f"its variant is {format_value(variant)}")
        if order not in get_args(ListOrder):
            raise ValueError(f"its order is {format_value(order)}")
    except (KeyError, ValueError, TypeError) as problem:
        raise damaged_policy_error(path, kind, f"its metadata cannot be read ({problem})") from None
    shape = SequenceShape(
        kind=kind,
        variant=cast(Variant, variant),
        devices=numbers["devices"],
        groups=numbers["groups"],
        width=numbers["width"],
        list_order=cast(ListOrder, order),
    )
    theta = np.zeros(0, dtype=np.float32)
    return SequencePolicy(shape, theta, family, numbers["graphs"], numbers["updates"], numbers["seed"])
