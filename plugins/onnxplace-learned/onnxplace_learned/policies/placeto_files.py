"""Policies of Placeto on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onnxplace.errors import UsageError
from onnxplace_learned.policies.networks import Policy, Shape, join_parameters, split_parameters
from onnxplace_learned.policies.training import Learner
from onnxplace_learned.policy_files import MAX_SIZES, PolicyFile, write_policy_file

KIND = "placeto"
# Names of the moments of the optimiser and of the mean of the parameters in a checkpoint.
MOMENTS = ("adam.first", "adam.second", "average")
# Prefix of the names of kept placements, which are written as numbers of devices.
KEPT = "kept."


def write_policy(path: Path, policy: Policy, learner: Learner | None = None) -> None:
    """Write a policy; with a learner, also what its training can be resumed from.

    Raises UsageError or ExecutionError if the file cannot be written.
    """
    tensors = split_parameters(policy.shape, policy.theta)
    tensors |= {f"{KEPT}{key}": device.astype(np.float32) for key, device in policy.kept.items()}
    if learner:
        tensors |= dict(zip(MOMENTS, (learner.first, learner.second, learner.average)))
    write_policy_file(path, KIND, (policy.shape, policy), tensors)


def read_policy(path: Path) -> Policy:
    """Return the policy in a file.

    Raises:
        InputError: The file cannot be read, is damaged, is not a policy, or is of a newer version.
    """
    return read_learner(path)[0]


def read_learner(path: Path) -> tuple[Policy, Learner | None]:
    """Return the policy in a file, and the learner if it is a checkpoint."""
    file = PolicyFile(path, KIND)
    shape = Shape(**file.read_fields(Shape, MAX_SIZES))
    names = list(split_parameters(shape, np.zeros(shape.parameters, dtype=np.float32)).items())
    rows = {name: (array.size,) for name, array in file.arrays.items() if name.startswith(KEPT)}
    moments = {name: (shape.parameters,) for name in MOMENTS if name in file.arrays}
    tensors = file.read_tensors({**{name: tensor.shape for name, tensor in names}, **rows, **moments})
    kept = {name: tensors[name].astype(np.int32) for name in rows}
    for name, device in kept.items():
        if (device != tensors[name]).any() or (device < 0).any() or (device >= shape.devices).any():
            raise file.damage(f"a kept placement has numbers that are none of {shape.devices} devices")
    policy = Policy(
        shape=shape,
        theta=join_parameters([tensors[name] for name, _ in names]),
        kept={name.removeprefix(KEPT): device for name, device in kept.items()},
        **file.read_fields(Policy),
    )
    if len(moments) < len(MOMENTS):
        return policy, None
    return policy, Learner(policy, *(tensors[name] for name in MOMENTS))


def require_devices(policy: Policy, devices: int, where: str) -> None:
    """Raise UsageError if there are more devices than a policy knows."""
    if devices > policy.shape.devices:
        message = f"the policy knows at most {policy.shape.devices} devices, expected {devices}"
        hint = f"use fewer devices, or `onnxplace learn placeto --devices {devices}`"
        raise UsageError("H006", message, where=where, hint=hint)
