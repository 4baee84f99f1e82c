"""The policy of `guided` in plain numpy, group by group: slow, and shares only features with the compiled one."""

import numpy as np


def embed(policy, graph):
    """Return the embedding of each node."""
    tensors, op_graph = policy.tensors, graph.problem.graph
    current = np.maximum(graph.node_features @ tensors["encode.weight"] + tensors["encode.bias"], 0)
    for index in range(policy.shape.rounds):
        means = [
            np.array([current[lists[node]].mean(axis=0) if len(lists[node]) else 0 * current[node] for node in nodes])
            for nodes in [range(len(op_graph))]
            for lists in (op_graph.predecessors, op_graph.successors)
        ]
        heard = current @ tensors[f"round{index}.own"] + tensors[f"round{index}.bias"]
        heard += means[0] @ tensors[f"round{index}.before"] + means[1] @ tensors[f"round{index}.after"]
        current = current + np.maximum(heard, 0)
    return current


def choose_devices(policy, graph, trace):
    """Return the device of the highest score for each decided group, and the scores, after the decisions of a trace."""
    tensors, problem, pairs = policy.tensors, graph.problem, graph.pairs
    nodes = embed(policy, graph)
    groups = range(len(problem.pinned))
    pooled = np.array([nodes[problem.group == group].mean(axis=0) for group in groups])
    best, scores = {}, {}
    for group in sorted(np.flatnonzero(trace.rank >= 0), key=lambda item: trace.rank[item]):
        own = np.zeros((len(problem.target.devices), policy.shape.message_width))
        mine = np.flatnonzero(pairs.groups == group)
        for pair in mine:
            other = pairs.neighbours[pair]
            if trace.rank[other] >= trace.rank[group]:
                continue
            device = problem.pinned[other] if problem.pinned[other] >= 0 else trace.choice[other]
            message = pooled[group] @ tensors["message.own"] + pooled[other] @ tensors["message.neighbour"]
            message = message + pairs.features[pair] @ tensors["message.pair"] + tensors["message.bias"]
            own[device] += np.maximum(message, 0) / len(mine)
        hidden = pooled[group] @ tensors["group.embedding"] + graph.group_features[group] @ tensors["group.features"]
        hidden = hidden + tensors["group.bias"] + own @ tensors["device.own"] + own.sum(axis=0) @ tensors["device.all"]
        hidden = hidden + trace.features[group] @ tensors["device.features"]
        scores[group] = np.where(trace.allowed[group], np.maximum(hidden, 0) @ tensors["device.output"], -np.inf)
        best[group] = int(scores[group].argmax())
    return best, scores
