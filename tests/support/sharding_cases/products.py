"""Cases of matrix products."""

import numpy as np

from tests.support.sharding_cases.rule_case import RuleCase

PRODUCTS = {
    "MatMul": RuleCase(
        "(float[4,6] a, float[6,8] b) => (float[4,8] y) { y = MatMul(a, b) }", splits=".1 -> 1, 0. -> 0, 10 -> +"
    ),
    "MatMul, batches": RuleCase(
        "(float[4,1,5,6] a, float[3,6,8] b) => (float[4,3,5,8] y) { y = MatMul(a, b) }",
        splits=".0 -> 1, .2 -> 3, 0. -> 0, 2. -> 2, 31 -> +",
    ),
    "MatMul, row": RuleCase(
        "(float[6] a, float[4,6,8] b) => (float[4,8] y) { y = MatMul(a, b) }", splits=".0 -> 0, .2 -> 1, 01 -> +"
    ),
    "MatMul, column": RuleCase(
        "(float[4,5,6] a, float[6] b) => (float[4,5] y) { y = MatMul(a, b) }", splits="0. -> 0, 1. -> 1, 20 -> +"
    ),
    "MatMul, vectors": RuleCase("(float[6] a, float[6] b) => (float y) { y = MatMul(a, b) }", splits="00 -> +"),
    "MatMul, integers": RuleCase(
        "(int32[4,6] a, int32[6,8] b) => (int32[4,8] y) { y = MatMul(a, b) }", splits=".1 -> 1, 0. -> 0, 10 -> +"
    ),
    "MatMul, integers that wrap": RuleCase(
        "(int32[4,6] a, int32[6,8] b) => (int32[4,8] y) { y = MatMul(a, b) }",
        splits=".1 -> 1, 0. -> 0, 10 -> +",
        feeds={"a": np.full((4, 6), 2**30 + 1), "b": np.full((6, 8), 3)},
    ),
    "Gemm": RuleCase(
        "(float[4,6] a, float[6,8] b, float[8] c) => (float[4,8] y) { y = Gemm<alpha=0.5>(a, b, c) }",
        splits=".10 -> 1, 0.. -> 0, 10. -> +",
    ),
    "Gemm, transposed": RuleCase(
        "(float[6,4] a, float[8,6] b, float[4,1] c) => (float[4,8] y) { y = Gemm<transA=1,transB=1>(a, b, c) }",
        splits=".0. -> 1, 01. -> +, 1.0 -> 0",
    ),
    "Gemm, matrix": RuleCase(
        "(float[4,6] a, float[6,8] b, float[4,8] c) => (float[4,8] y) { y = Gemm(a, b, c) }",
        splits=".11 -> 1, 0.0 -> 0, 10. -> +",
    ),
    "Gemm, opset 9": RuleCase(
        "(float[4,6] a, float[6,8] b, float[1,8] c) => (float[4,8] y) { y = Gemm(a, b, c) }",
        splits=".11 -> 1, 0.. -> 0",
        opset=9,
    ),
    "Einsum": RuleCase(
        '(float[4,6,3] a, float[4,3,8] b) => (float[6,8,4] y) { y = Einsum<equation="bij,bjk->ikb">(a, b) }',
        splits=".2 -> 1, 00 -> 2, 1. -> 0, 21 -> +",
    ),
    "Einsum, sum": RuleCase(
        '(float[4,6,3] a) => (float[6] y) { y = Einsum<equation="bij->i">(a) }', splits="0 -> +, 1 -> 0, 2 -> +"
    ),
    "Einsum, sum of integers": RuleCase(
        '(int32[4,6] a) => (int32[4] y) { y = Einsum<equation="ij->i">(a) }',
        splits="0 -> 0",
        feeds={"a": np.full((4, 6), 2**30 + 1)},
    ),
    "Einsum, diagonal": RuleCase(
        '(float[4,4,6] a) => (float[4,6] y) { y = Einsum<equation="iij->ij">(a) }', splits="2 -> 1"
    ),
    "Einsum, broadcast": RuleCase(
        '(float[1,6] a, float[4,6] b) => (float[4,6] y) { y = Einsum<equation="ij,ij->ij">(a, b) }', splits="11 -> 1"
    ),
    "MatMulInteger": RuleCase(
        "(uint8[4,6] a, int8[6,8] b) => (int32[4,8] y) { y = MatMulInteger(a, b) }", splits=".1 -> 1, 0. -> 0, 10 -> +"
    ),
    "MatMulInteger, zero points": RuleCase(
        "(uint8[4,6] a, int8[6,8] b, uint8 za, int8[8] zb) => (int32[4,8] y) { y = MatMulInteger(a, b, za, zb) }",
        splits=".1.0 -> 1, 0... -> 0, 10.. -> +",
    ),
    "QLinearMatMul": RuleCase(
        """(uint8[4,6] a, float sa, uint8 za, int8[6,8] b, float sb, int8 zb, float sy, uint8 zy) => (uint8[4,8] y) {
            y = QLinearMatMul(a, sa, za, b, sb, zb, sy, zy) }""",
        splits="...1.... -> 1, 0....... -> 0",
    ),
    "QLinearMatMul, columns": RuleCase(
        """(uint8[4,6] a, float sa, uint8 za, int8[6,8] b, float[8] sb, int8[8] zb, float sy, uint8 zy)
        => (uint8[4,8] y) { y = QLinearMatMul(a, sa, za, b, sb, zb, sy, zy) }""",
        splits="...100.. -> 1, 0....... -> 0",
    ),
    "FusedMatMul": RuleCase(
        """(float[3,6,4] a, float[3,8,6] b) => (float[3,4,8] y) {
            y = com.microsoft.FusedMatMul<transA=1,transB=1,alpha=0.5>(a, b) }""",
        splits=".1 -> 2, 00 -> 0, 12 -> +, 2. -> 1",
    ),
    "FusedGemm": RuleCase(
        """(float[4,6] a, float[6,8] b, float[8] c) => (float[4,8] y) {
            y = com.microsoft.FusedGemm<activation="Relu">(a, b, c) }""",
        splits=".10 -> 1, 0.. -> 0",
    ),
    "DynamicQuantizeMatMul": RuleCase(
        """(float[2,4,6] a, int8[6,8] b, float[8] s, int8[8] z, float[8] c) => (float[2,4,8] y) {
            y = com.microsoft.DynamicQuantizeMatMul(a, b, s, z, c) }""",
        splits=".1000 -> 2, 0.... -> 0, 1.... -> 1",
    ),
    "DynamicQuantizeMatMul, one scale": RuleCase(
        """(float[4,6] a, uint8[6,8] b, float s, uint8 z) => (float[4,8] y) {
            y = com.microsoft.DynamicQuantizeMatMul(a, b, s, z) }""",
        splits=".1.. -> 1, 0... -> 0",
    ),
    "MatMulIntegerToFloat": RuleCase(
        """(uint8[4,6] a, int8[6,8] b, float sa, float[8] sb, uint8 za, int8[8] zb, float[8] c) => (float[4,8] y) {
            y = com.microsoft.MatMulIntegerToFloat(a, b, sa, sb, za, zb, c) }""",
        splits=".1.0.00 -> 1, 0...... -> 0",
    ),
    "QGemm": RuleCase(
        """(uint8[4,6] a, float sa, uint8 za, int8[8,6] b, float[8] sb, int8[8] zb, int32[8] c, float sy, uint8 zy)
        => (uint8[4,8] y) { y = com.microsoft.QGemm<transB=1>(a, sa, za, b, sb, zb, c, sy, zy) }""",
        splits="...0000.. -> 1, 0........ -> 0",
    ),
    "MatMulNBits": RuleCase(
        """(float[2,4,32] a, uint8[8,2,8] b, float[16] s) => (float[2,4,8] y) {
            y = com.microsoft.MatMulNBits<K=32,N=8,bits=4,block_size=16>(a, b, s) }""",
        splits=".00 -> 2, 0.. -> 0, 1.. -> 1",
    ),
    "MatMulNBits, zero points and bias": RuleCase(
        """(float[4,32] a, uint8[12,2,8] b, float[12,2] s, uint8[12,1] z, float[12] c) => (float[4,12] y) {
            y = com.microsoft.MatMulNBits<K=32,N=12,bits=4,block_size=16>(a, b, s, z, , c) }""",
        splits=".000-0 -> 1, 0...-. -> 0",
    ),
    "MatMulNBits, flat zero points": RuleCase(
        """(float[4,48] a, uint8[12,3,8] b, float[36] s, uint8[24] z) => (float[4,12] y) {
            y = com.microsoft.MatMulNBits<K=48,N=12,bits=4,block_size=16>(a, b, s, z) }""",
        splits=".000 -> 1, 0... -> 0",
    ),
    "MatMulBnb4": RuleCase(
        """(float[4,32] a, uint8[128] b, float[16] m) => (float[4,8] y) {
            y = com.microsoft.MatMulBnb4<K=32,N=8,block_size=16,quant_type=1>(a, b, m) }""",
        splits="0.. -> 0",
    ),
    "MoE": RuleCase(
        """(float[4,6] x, float[4,3] r, float[3,8,6] w, float[3,8] b, float[3,6,8] v, float[3,6] c) => (float[4,6] y) {
            y = com.microsoft.MoE<k=2,activation_type="gelu">(x, r, w, b, v, c) }""",
        splits="..112. -> +, 00.... -> 0",
        returns_all=True,
    ),
    "MoE, samples": RuleCase(
        """(float[2,3,6] x, float[6,3] r, float[3,8,6] w, float[3,6,8] v) => (float[2,3,6] y) {
            y = com.microsoft.MoE<k=1,activation_type="silu",normalize_routing_weights=1>(x, r, w, , v) }""",
        splits="..1-2 -> +, 00.-. -> 0",
        returns_all=True,
    ),
    "MoE, interleaved gates": RuleCase(
        """(float[4,6] x, float[4,3] r, float[3,8,6] w, float[3,8] b, float[3,6,4] v, float[3,6] c) => (float[4,6] y) {
            y = com.microsoft.MoE<k=2,activation_type="swiglu",swiglu_fusion=1,activation_alpha=1.7,activation_beta=1.0>
                (x, r, w, b, v, c) }""",
        splits="..112. -> +, 00.... -> 0",
        returns_all=True,
    ),
    "QMoE": RuleCase(
        """(float[4,32] x, float[4,2] r, uint8[2,16,16] w, float[2,16] s, uint8[2,32,8] v, float[2,32] t)
        => (float[4,32] y) {
            y = com.microsoft.QMoE<k=1,expert_weight_bits=4,activation_type="relu">(x, r, w, s, , v, t) }""",
        splits="00..-.. -> 0",
    ),
    "TransposeMatMul": RuleCase(
        "(float[6,4] a, float[6,8] b) => (float[4,8] y) { y = com.microsoft.TransposeMatMul<transA=1>(a, b) }",
        splits=".1 -> 1, 00 -> +, 1. -> 0",
    ),
}
