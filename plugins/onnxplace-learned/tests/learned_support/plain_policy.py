"""Placeto's policy in plain numpy, node by node: slow, and shares nothing with the compiled one."""

import numpy as np


def apply_net(tensors, net, row, *, last_is_linear=False):
    count = sum(name.startswith(f"{net}.") and name.endswith(".weight") for name in tensors)
    for index in range(count):
        row = row @ tensors[f"{net}.{index}.weight"].astype(float) + tensors[f"{net}.{index}.bias"]
        if index + 1 < count or not last_is_linear:
            row = np.maximum(row, 0)
    return row


def embed(tensors, direction, first, neighbours, rounds):
    """Return the embeddings after so many rounds; `neighbours` are the nodes that each node hears from."""
    current = first
    for _ in range(rounds):
        sent = [apply_net(tensors, f"{direction}.send", row) for row in current]
        heard = [sum((sent[other] for other in row), np.zeros(first.shape[1])) for row in neighbours]
        current = first + np.array([apply_net(tensors, f"{direction}.receive", row) for row in heard])
    return current


def score(tensors, rounds, graph, features, current):
    """Return the scores of devices for the node `current`; `features` is [node, feature]."""
    nodes = range(len(graph))
    before = [graph.predecessors[node].tolist() for node in nodes]
    after = [graph.successors[node].tolist() for node in nodes]
    first = np.array([apply_net(tensors, "encode", row) for row in features.astype(float)])
    both = np.hstack(
        [embed(tensors, "forward", first, before, rounds), embed(tensors, "backward", first, after, rounds)]
    )
    ancestors, descendants = reach(before, current), reach(after, current)
    related = {
        "ancestors": ancestors,
        "descendants": descendants,
        "parallel": set(nodes) - ancestors - descendants - {current},
    }
    parts = [both[current]]
    for kind, others in related.items():
        heard = sum((apply_net(tensors, f"{kind}.send", both[node]) for node in others), np.zeros(both.shape[1]))
        parts.append(apply_net(tensors, f"{kind}.receive", heard / len(graph)))
    return apply_net(tensors, "choose", np.concatenate(parts), last_is_linear=True)


def reach(neighbours, node):
    reached, waiting = set(), [node]
    while waiting:
        for other in neighbours[waiting.pop()]:
            if other not in reached:
                reached.add(other)
                waiting.append(other)
    return reached
