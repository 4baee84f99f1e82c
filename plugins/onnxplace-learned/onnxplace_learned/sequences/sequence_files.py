"""Policies of `hierarchical` and `go` on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onnxplace.errors import format_value
from onnxplace_learned.policy_files import MAX_SIZES, PolicyFile, write_policy_file
from onnxplace_learned.sequences.sequence_learner import SequenceLearner
from onnxplace_learned.sequences.sequence_policy import ATTENTION_HEADS, VARIANTS, Kind, SequencePolicy, SequenceShape

# Names of the moments of the optimiser and of the baselines in a checkpoint.
MOMENTS, BASELINES = ("adam.first", "adam.second"), "baselines"


def write_sequence_policy(path: Path, policy: SequencePolicy, learner: SequenceLearner | None = None) -> None:
    """Write a policy; with a learner, also what its training can be resumed from.

    Raises UsageError or ExecutionError if the file cannot be written.
    """
    shape, tensors = policy.shape, policy.shape.split(policy.theta)
    if learner:
        tensors |= dict(zip((*MOMENTS, BASELINES), (learner.first, learner.second, learner.baseline)))
    write_policy_file(path, shape.kind, (shape, policy), tensors)


def read_sequence_policy(path: Path, kind: Kind) -> SequencePolicy:
    """Return the policy of a kind in a file.

    Raises:
        InputError: The file cannot be read, is damaged, is not such a policy, or is of a newer version.
    """
    return read_sequence_learner(path, kind)[0]


def read_sequence_learner(path: Path, kind: Kind) -> tuple[SequencePolicy, SequenceLearner | None]:
    """Return the policy in a file, and the learner if it is a checkpoint."""
    file = PolicyFile(path, kind)
    shape = SequenceShape(**file.read_fields(SequenceShape, MAX_SIZES))
    described = file.read_fields(SequencePolicy)
    if shape.variant not in VARIANTS[kind]:
        raise file.damage(f"its metadata cannot be read (its variant is {format_value(shape.variant)})")
    if shape.width % ATTENTION_HEADS:
        raise file.damage(f"its metadata cannot be read (its sizes are not multiples of {ATTENTION_HEADS})")
    shapes, parameters = shape.sizes, (shape.parameters,)
    if BASELINES in file.arrays:
        shapes |= {**dict.fromkeys(MOMENTS, parameters), BASELINES: (described["graphs"],)}
    tensors = file.read_tensors(shapes)
    policy = SequencePolicy(shape, np.concatenate([tensors[name].ravel() for name in shape.sizes]), **described)
    if BASELINES not in tensors:
        return policy, None
    return policy, SequenceLearner(policy, *(tensors[name] for name in (*MOMENTS, BASELINES)))
