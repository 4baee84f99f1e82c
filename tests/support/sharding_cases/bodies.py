"""Cases of nodes with subgraphs; the splits name captured values behind the inputs of the node."""

import numpy as np

from tests.support.sharding_cases.rule_case import RuleCase

BODIES = {
    "If": RuleCase(
        """(float[4,6] x, float[6] b, bool c) => (float[4,6] y) { y = If(c) <
            then_branch = t () => (float[4,6] p) { q = Add(x, b) p = Relu(q) },
            else_branch = e () => (float[4,6] r) { r = Mul(x, x) }> }""",
        splits=".0. -> 0, .10 -> 1",
    ),
    "If, branches of unlike nodes": RuleCase(
        """(float[4,6] x, float[6,8] w, float[4,8] z, bool c) => (float[4,8] y) { y = If(c) <
            then_branch = t () => (float[4,8] p) { p = MatMul(x, w) },
            else_branch = e () => (float[4,8] r) <int64[2] s = {4, 8}> { q = Reshape(z, s) r = Softmax(q) }> }""",
        splits="...0 -> 0, ..1. -> 1, .0.. -> 0, .0.0 -> 0",
    ),
    "If, summands": RuleCase(
        """(float[4,6] x, float[6,8] w, bool c) => (float[4,8] y) { y = If(c) <
            then_branch = t () => (float[4,8] p) { p = MatMul(x, w) },
            else_branch = e () => (float[4,8] r) { q = MatMul(x, w) r = Neg(q) }> }""",
        splits="..1 -> 1, .0. -> 0, .10 -> +",
    ),
    "Loop": RuleCase(
        """(float[4,6] x, float[6] b, int64 n) => (float[4,6] y) { y = Loop(n, , x) <
            body = l (int64 i, bool go, float[4,6] s) => (bool g, float[4,6] t) {
                g = Identity(go) u = Add(s, b) t = Tanh(u) }> }""",
        splits=".-0. -> 0, .-10 -> 1",
    ),
    "Loop, two states that swap": RuleCase(
        """(float[4,6] x, float[4,6] z, float[6,6] w, int64 n) => (float[4,6] y, float[4,6] v) {
            y, v = Loop(n, , x, z) <
            body = l (int64 i, bool go, float[4,6] s, float[4,6] t) => (bool g, float[4,6] p, float[4,6] q) {
                g = Identity(go) p = MatMul(t, w) q = Tanh(s) }> }""",
        splits=".-00. -> 00",
    ),
    "Loop, state that grows": RuleCase(
        """(float[4,6] x, int64 n) => (float[4,M] y) { y = Loop(n, , x) <
            body = l (int64 i, bool go, float[4,K] s) => (bool g, float[4,L] t) {
                g = Identity(go) t = Concat<axis=1>(s, x) }> }"""
    ),
    "Loop, condition from its values": RuleCase(
        """(float[4,6] x, int64 n) => (float[4,6] y) <bool c = {1}, float limit = {99}> { y = Loop(n, c, x) <
            body = l (int64 i, bool go, float[4,6] s) => (bool g, float[4,6] t) {
                t = Add(s, s) m = ReduceMax<keepdims=0>(t) g = Less(m, limit) }> }"""
    ),
    "Loop, an If inside": RuleCase(
        """(float[4,6] x, float[6,6] w, int64 n) => (float[4,6] y) { y = Loop(n, , x) <
            body = l (int64 i, bool go, float[4,6] s) => (bool g, float[4,6] t) {
                g = Identity(go) k = Cast<to=9>(i) t = If(k) <
                    then_branch = t () => (float[4,6] p) { p = MatMul(s, w) },
                    else_branch = e () => (float[4,6] r) { r = Tanh(s) }> }> }""",
        splits=".-0. -> 0",
    ),
    "Scan": RuleCase(
        """(float[4,6] h, float[4,5,6] x, float[6,6] w) => (float[4,6] y, float[4,6,5] z) { y, z =
            Scan<num_scan_inputs=1, scan_input_axes=[1], scan_output_axes=[2], body = l (float[4,6] s, float[4,6] e)
                => (float[4,6] t, float[4,6] o) { u = MatMul(s, w) v = Add(u, e) t = Tanh(v) o = Relu(t) }>(h, x) }""",
        splits="00. -> 00",
    ),
    "Scan, parts of its outputs": RuleCase(
        """(float[5,4,6] x, float[6,8] w) => (float[5,4,8] z) { z =
            Scan<num_scan_inputs=1, body = l (float[4,6] e) => (float[4,8] o) { o = MatMul(e, w) }>(x) }""",
        splits=".1 -> 2, 1. -> 1, 20 -> +",
    ),
}
for case in BODIES.values():
    case.feeds.update({"n": np.int64(3), "c": np.bool_(True)})
