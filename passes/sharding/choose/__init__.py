"""One way per node, so that the step is short and memory suffices."""
