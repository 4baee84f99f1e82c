"""Cases of normalisations."""

import numpy as np

from tests.support.sharding_cases.rule_case import RuleCase, i32

NORMALIZATIONS = {
    "BatchNormalization": RuleCase(
        """(float[2,4,3] x, float[4] s, float[4] b, float[4] m, float[4] v) => (float[2,4,3] y) {
            y = BatchNormalization(x, s, b, m, v) }""",
        splits="0.... -> 0, 10000 -> 1, 2.... -> 2",
    ),
    "BatchNormalization, training": RuleCase(
        """(float[2,4,3] x, float[4] s, float[4] b, float[4] m, float[4] v)
        => (float[2,4,3] y, float[4] n, float[4] w) {
            y, n, w = BatchNormalization<training_mode=1>(x, s, b, m, v) }"""
    ),
    "InstanceNormalization": RuleCase(
        "(float[2,4,3,3] x, float[4] s, float[4] b) => (float[2,4,3,3] y) { y = InstanceNormalization(x, s, b) }",
        splits="0.. -> 0, 100 -> 1",
    ),
    "GroupNormalization": RuleCase(
        """(float[2,8,3,3] x, float[8] s, float[8] b) => (float[2,8,3,3] y) {
            y = GroupNormalization<num_groups=4>(x, s, b) }""",
        splits="0.. -> 0, 100 -> 1",
    ),
    "GroupNormalization, opset 18": RuleCase(
        """(float[2,8,3,3] x, float[4] s, float[4] b) => (float[2,8,3,3] y) {
            y = GroupNormalization<num_groups=4>(x, s, b) }""",
        splits="0.. -> 0, 100 -> 1",
        opset=18,
    ),
    "LpNormalization": RuleCase(
        "(float[4,6,2] x) => (float[4,6,2] y) { y = LpNormalization<axis=-2>(x) }", splits="0 -> 0, 2 -> 2"
    ),
    "LayerNormalization": RuleCase(
        """(float[4,3,6] x, float[6] s, float[6] b) => (float[4,3,6] y, float[4,3,1] m, float[4,3,1] d) {
            y, m, d = LayerNormalization(x, s, b) }""",
        splits="0.. -> 000, 1.. -> 111",
    ),
    "LayerNormalization, two axes": RuleCase(
        """(float[4,3,6] x, float[3,6] s) => (float[4,3,6] y) { y = LayerNormalization<axis=-2>(x, s) }""",
        splits="0. -> 0",
    ),
    "LayerNormalization, scale of more axes": RuleCase(
        """(float[4,3,6] x, float[3,6] s) => (float[4,3,6] y) { y = LayerNormalization(x, s) }"""
    ),
    "RMSNormalization": RuleCase(
        "(float[4,3,6] x, float[6] s) => (float[4,3,6] y) { y = RMSNormalization(x, s) }",
        splits="0. -> 0, 1. -> 1",
        opset=23,
    ),
    "SimplifiedLayerNormalization": RuleCase(
        "(float[4,3,6] x, float[6] s) => (float[4,3,6] y) { y = SimplifiedLayerNormalization(x, s) }",
        splits="0. -> 0, 1. -> 1",
    ),
    "SkipLayerNormalization": RuleCase(
        """(float[4,3,6] x, float[4,3,6] k, float[6] s, float[6] b, float[6] c) => (float[4,3,6] y, float[4,3,6] z) {
            y, , , z = com.microsoft.SkipLayerNormalization(x, k, s, b, c) }""",
        splits="00... -> 0--0, 11... -> 1--1",
    ),
    "SkipLayerNormalization, broadcast": RuleCase(
        """(float[4,3,6] x, float[1,3,6] k, float[6] s) => (float[4,3,6] y) {
            y = com.microsoft.SkipLayerNormalization(x, k, s) }""",
        splits="0.. -> 0, 11. -> 1",
    ),
    "SkipLayerNormalization, repeated": RuleCase(
        """(float[4,3,6] x, float[2,3,6] k, float[6] s) => (float[4,3,6] y) {
            y = com.microsoft.SkipLayerNormalization(x, k, s) }"""
    ),
    "SkipSimplifiedLayerNormalization": RuleCase(
        """(float[4,3,6] x, float[3,6] k, float[6] s) => (float[4,3,6] y, float[4,3,6] z) {
            y, , , z = com.microsoft.SkipSimplifiedLayerNormalization(x, k, s) }""",
        splits="0.. -> 0--0, 10. -> 1--1",
    ),
    "EmbedLayerNormalization": RuleCase(
        """(int32[4,3] i, int32[4,3] t, float[5,6] w, float[8,6] p, float[2,6] q, float[6] s, float[6] b, int32[4,3] m)
        => (float[4,3,6] y, int32[4] k, float[4,3,6] z) {
            y, k, z = com.microsoft.EmbedLayerNormalization(i, t, w, p, q, s, b, m) }""",
        splits="00.....0 -> 000",
        feeds={"t": i32([[0, 1, 0]] * 4), "m": i32([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])},
    ),
    "EmbedLayerNormalization, position ids": RuleCase(
        """(int32[4,3] i, float[5,6] w, float[8,6] p, float[6] s, float[6] b, int32[1,3] o)
        => (float[4,3,6] y, int32[4] k) {
            y, k = com.microsoft.EmbedLayerNormalization(i, , w, p, , s, b, , o) }""",
        splits="0-..-..-. -> 00",
    ),
    "Softmax": RuleCase("(float[4,6,2] x) => (float[4,6,2] y) { y = Softmax<axis=1>(x) }", splits="0 -> 0, 2 -> 2"),
    "Softmax, opset 11": RuleCase("(float[4,6,2] x) => (float[4,6,2] y) { y = Softmax(x) }", splits="0 -> 0", opset=11),
    "LogSoftmax": RuleCase("(float[4,6] x) => (float[4,6] y) { y = LogSoftmax(x) }", splits="0 -> 0"),
    "Hardmax": RuleCase("(float[4,6] x) => (float[4,6] y) { y = Hardmax(x) }", splits="0 -> 0"),
    "QLinearSoftmax": RuleCase(
        """(uint8[4,6,2] x, float sx, uint8 zx, float sy, uint8 zy) => (uint8[4,6,2] y) {
            y = com.microsoft.QLinearSoftmax<axis=1,opset=13>(x, sx, zx, sy, zy) }""",
        splits="0.... -> 0, 2.... -> 2",
        feeds={"sy": np.float32(1 / 256), "zy": np.uint8(0)},
    ),
    "QEmbedLayerNormalization": RuleCase(
        """(int32[4,3] i, int32[4,3] t, uint8[5,6] w, uint8[8,6] p, uint8[2,6] q, uint8[6] s, uint8[6] b, int32[4,3] m,
            float sw, float sp, float sq, float ss, float sb, uint8 zw, uint8 zp, uint8 zq, uint8 zs, uint8 zb)
        => (float[4,3,6] y, int32[4] k) {
            y, k = com.microsoft.QEmbedLayerNormalization
                (i, t, w, p, q, s, b, m, sw, sp, sq, ss, sb, zw, zp, zq, zs, zb) }""",
        splits="00.....0.......... -> 00",
        feeds={"t": i32([[0, 1, 0]] * 4), "m": i32([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])},
    ),
}
