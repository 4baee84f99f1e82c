"""Policies on disk, as safetensors: parameters by name, and what the policy is as metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

import numpy as np

from onnxplace.errors import UsageError, format_value
from onnxplace.graph import Ints
from onnxplace.utils import write_arrays
from onnxplace_learned.policies.networks import LearnFrom, Policy, Shape, join_parameters, split_parameters
from onnxplace_learned.policies.policy_kernels import Singles
from onnxplace_learned.policies.policy_tensors import (
    FORMAT,
    MAX_DEVICES,
    MAX_ROUNDS,
    MAX_WIDTH,
    damaged_policy_error,
    newer_policy_error,
    open_policy,
    require_tensors,
)
from onnxplace_learned.policies.training import Learner
from onnxplace_learned.policies.visiting_orders import Order, Reward, Start

KIND, VERSION = "placeto", 2
# Names of the moments of the optimiser and of the mean of the parameters in a checkpoint.
MOMENTS = ("adam.first", "adam.second", "average")
# Prefix of the names of kept placements, which are written as numbers of devices.
KEPT = "kept."


def write_policy(path: Path, policy: Policy, learner: Learner | None = None) -> None:
    """Write a policy; with a learner, also the moments from which its training can be resumed.

    Raises UsageError or ExecutionError if the file cannot be written.
    """
    tensors = split_parameters(policy.shape, policy.theta)
    tensors |= {f"{KEPT}{key}": device.astype(np.float32) for key, device in policy.kept.items()}
    if learner:
        tensors |= dict(zip(MOMENTS, (learner.first, learner.second, learner.average)))
    metadata = {
        "format": FORMAT,
        "kind": KIND,
        "version": VERSION,
        "devices": policy.shape.devices,
        "width": policy.shape.width,
        "rounds": policy.shape.rounds,
        "order": policy.order,
        "start": policy.start,
        "family": policy.family,
        "graphs": policy.graphs,
        "updates": policy.updates,
        "seed": policy.seed,
        "learned_from": policy.learned_from,
        "reward": policy.reward,
        "max_nodes": policy.max_nodes,
    }
    write_arrays(path, tensors, {key: str(value) for key, value in metadata.items()})


def read_policy(path: Path) -> Policy:
    """Return the policy in a file.

    Raises:
        InputError: The file cannot be read, is damaged, is not a policy, or is of a newer version.
    """
    return read_learner(path)[0]


def read_learner(path: Path) -> tuple[Policy, Learner | None]:
    """Return the policy in a file, and the learner if it is a checkpoint."""
    file = open_policy(path, KIND)
    tensors, policy = file.arrays, _read_description(file.metadata, path)
    expected = {name: tensor.shape for name, tensor in split_parameters(policy.shape, policy.theta).items()}
    moments = {name: tensors[name] for name in MOMENTS if name in tensors}
    rows = {name: (tensor.size,) for name, tensor in tensors.items() if name.startswith(KEPT)}
    require_tensors(tensors, {**expected, **rows, **dict.fromkeys(moments, policy.theta.shape)}, path, KIND)
    kept = {name.removeprefix(KEPT): _read_devices(tensors[name], policy, path) for name in rows}
    policy = policy.with_parameters(join_parameters([tensors[name] for name in expected]), policy.updates)
    policy = replace(policy, kept=kept)
    # Copies, so that nothing refers to the file any more.
    learner = Learner(policy, *map(np.array, moments.values())) if len(moments) == len(MOMENTS) else None
    return policy, learner


def _read_description(metadata: Mapping[str, str], path: Path) -> Policy:
    """Return a policy without trained parameters; raises InputError for one that this version does not know."""
    try:
        version = int(metadata["version"])
        if version > VERSION or metadata["kind"] != KIND:
            raise newer_policy_error(path, KIND, VERSION, metadata)
        sizes = {"devices": MAX_DEVICES, "width": MAX_WIDTH, "rounds": MAX_ROUNDS}
        numbers = {key: int(metadata[key]) for key in (*sizes, "graphs", "updates", "seed")}
        # Files of earlier versions do not have these two.
        numbers["max_nodes"] = int(metadata.get("max_nodes", 0))
        reward = metadata.get("reward", "simulated")
        if reward not in get_args(Reward):
            raise ValueError(f"its reward is {format_value(reward)}")
        if any(not 1 <= numbers[key] <= limit for key, limit in sizes.items()) or min(numbers.values()) < 0:
            raise ValueError(f"its sizes are {numbers}")
        if metadata["order"] not in get_args(Order):
            raise ValueError(f"its order is {format_value(metadata['order'])}")
        if metadata["start"] not in get_args(Start):
            raise ValueError(f"its start is {format_value(metadata['start'])}")
        # Policies of version 1 learned from rewards.
        learned_from = metadata.get("learned_from", "rewards")
        if learned_from not in get_args(LearnFrom):
            raise ValueError(f"it learned from {format_value(learned_from)}")
        family = str(metadata["family"])
    except (KeyError, ValueError, TypeError) as problem:
        raise damaged_policy_error(path, KIND, f"its metadata cannot be read ({problem})") from None
    shape = Shape(numbers["devices"], numbers["width"], numbers["rounds"])
    return Policy(
        shape=shape,
        theta=np.zeros(shape.parameters, dtype=np.float32),
        order=cast(Order, metadata["order"]),
        start=cast(Start, metadata["start"]),
        family=family,
        graphs=numbers["graphs"],
        updates=numbers["updates"],
        seed=numbers["seed"],
        learned_from=cast(LearnFrom, learned_from),
        reward=cast(Reward, reward),
        max_nodes=numbers["max_nodes"],
    )


def _read_devices(row: Singles, policy: Policy, path: Path) -> Ints:
    """Return a kept placement; raises InputError for numbers that are no devices."""
    devices = row.astype(np.int32)
    if (devices != row).any() or (devices < 0).any() or (devices >= policy.shape.devices).any():
        raise damaged_policy_error(
            path, KIND, f"a kept placement has numbers that are none of {policy.shape.devices} devices"
        )
    return devices


def require_devices(policy: Policy, devices: int, where: str) -> None:
    """Raise UsageError if there are more devices than a policy knows."""
    if devices > policy.shape.devices:
        message = f"the policy knows at most {policy.shape.devices} devices, expected {devices}"
        hint = f"use fewer devices, or `onnxplace learn placeto --devices {devices}`"
        raise UsageError("H006", message, where=where, hint=hint)
