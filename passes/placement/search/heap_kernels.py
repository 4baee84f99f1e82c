"""Binary heaps of nodes in arrays, by smallest key."""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

from onnxplace.utils import compiled_part


@compiled_part
def push(heap, size, node, key):
    """Add a node to a heap of `size` nodes; ties go to the lower index."""
    # Move the ancestors that come after the node down, and put it where they end.
    child = size
    while child > 0:
        parent = (child - 1) // 2
        other = heap[parent]
        if key[other] < key[node] or (key[other] == key[node] and other < node):
            break
        heap[child] = other
        child = parent
    heap[child] = node


@compiled_part
def pop(heap, size, key):
    """Remove and return the node of smallest key from a heap of `size` nodes."""
    top = heap[0]
    node = heap[size - 1]
    size -= 1
    # The last node fills the gap at the top: move the first of the two children up until it fits.
    parent = 0
    while True:
        child = 2 * parent + 1
        if child >= size:
            break
        if child + 1 < size:
            left, right = heap[child], heap[child + 1]
            if key[right] < key[left] or (key[right] == key[left] and right < left):
                child += 1
        other = heap[child]
        if key[node] < key[other] or (key[node] == key[other] and node < other):
            break
        heap[parent] = other
        parent = child
    heap[parent] = node
    return top
