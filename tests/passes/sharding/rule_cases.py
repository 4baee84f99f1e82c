"""Models of one operator, as text, with the splits that its rule gives."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RuleCase:
    """A model and its splits."""

    text: str
    """Inputs, outputs and nodes, without the header."""
    splits: str = ""
    """Of two devices: axes of inputs and outputs, `.` for whole, `+` for summands, `-` for omitted; by commas."""
    opset: int = 21
    feeds: dict[str, Any] = field(default_factory=dict)
    """Inputs that may not be random."""
    returns_all: bool = False
    """All values are returned: ONNX Runtime's kernel adds to the memory of its result, which is zero only if new."""


def i64(*values: int) -> Any:
    return np.array(values, np.int64)


def i32(values: Any) -> Any:
    return np.array(values, np.int32)


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
        splits=".1000 -> 2",
    ),
    "DynamicQuantizeMatMul, one scale": RuleCase(
        """(float[4,6] a, uint8[6,8] b, float s, uint8 z) => (float[4,8] y) {
            y = com.microsoft.DynamicQuantizeMatMul(a, b, s, z) }""",
        splits=".1.. -> 1",
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
}

CONVOLUTIONS = {
    "Conv": RuleCase(
        "(float[2,4,6,5] x, float[8,4,3,3] w, float[8] b) => (float[2,8,4,3] y) { y = Conv(x, w, b) }",
        splits="... -> 2, .00 -> 1, 0.. -> 0, 11. -> +, 2.. -> 2",
    ),
    "Conv, groups": RuleCase(
        """(float[2,8,6,5] x, float[8,2,3,3] w, float[8] b) => (float[2,8,6,5] y) {
            y = Conv<group=4,pads=[1,1,1,1]>(x, w, b) }""",
        splits="... -> 2, 0.. -> 0, 100 -> 1, 2.. -> 2",
    ),
    "Conv, strides and dilations": RuleCase(
        """(float[1,3,11,9] x, float[4,3,3,2] w) => (float[1,4,5,5] y) {
            y = Conv<strides=[2,2],dilations=[2,1],pads=[1,1,2,1]>(x, w) }""",
        splits=".. -> 2, .0 -> 1, 11 -> +, 2. -> 2",
    ),
    "Conv, 1-D": RuleCase(
        '(float[2,4,9] x, float[6,4,4] w) => (float[2,6,9] y) { y = Conv<auto_pad="SAME_LOWER">(x, w) }',
        splits=".. -> 2, .0 -> 1, 0. -> 0, 11 -> +, 2. -> 2",
    ),
    "Conv, 3-D": RuleCase(
        """(float[1,2,7,4,4] x, float[4,2,3,3,3] w) => (float[1,4,3,4,4] y) {
            y = Conv<pads=[0,1,1,0,1,1],strides=[2,1,1]>(x, w) }""",
        splits=".. -> 2, .0 -> 1, 11 -> +, 2. -> 2",
    ),
    "ConvTranspose": RuleCase(
        """(float[2,4,5,3] x, float[4,6,3,3] w, float[6] b) => (float[2,6,10,5] y) {
            y = ConvTranspose<strides=[2,1],pads=[1,0,1,0],output_padding=[1,0]>(x, w, b) }""",
        splits="... -> 2, .10 -> 1, 0.. -> 0, 10. -> +, 2.. -> 2",
    ),
    "ConvTranspose, groups": RuleCase(
        """(float[2,6,5,3] x, float[6,2,2,2] w, float[6] b) => (float[2,6,6,4] y) {
            y = ConvTranspose<group=3>(x, w, b) }""",
        splits="... -> 2, 0.. -> 0, 100 -> 1, 2.. -> 2",
    ),
    "ConvTranspose, dilations": RuleCase(
        """(float[1,2,6] x, float[2,2,3] w) => (float[1,2,16] y) {
            y = ConvTranspose<dilations=[3],strides=[2],pads=[0,1]>(x, w) }""",
        splits=".. -> 2, .1 -> 1, 10 -> +, 2. -> 2",
    ),
    "ConvTranspose, same": RuleCase(
        """(float[1,4,5,3] x, float[4,6,3,3] w) => (float[1,6,10,6] y) {
            y = ConvTranspose<strides=[2,2],auto_pad="SAME_UPPER">(x, w) }""",
        splits=".1 -> 1, 10 -> +",
    ),
    "FusedConv": RuleCase(
        """(float[2,4,6,5] x, float[8,4,3,3] w, float[8] b, float[2,8,4,3] z) => (float[2,8,4,3] y) {
            y = com.microsoft.FusedConv<activation="Relu">(x, w, b, z) }""",
        splits=".001 -> 1, 0..0 -> 0",
    ),
    "ConvInteger": RuleCase(
        """(uint8[2,4,6,5] x, int8[8,4,3,3] w, uint8 z) => (int32[2,8,6,5] y) {
            y = ConvInteger<pads=[1,1,1,1]>(x, w, z) }""",
        splits="... -> 2, .0. -> 1, 0.. -> 0, 11. -> +, 2.. -> 2",
    ),
    "ConvInteger, groups": RuleCase(
        "(uint8[2,4,6,5] x, int8[8,2,3,3] w) => (int32[2,8,4,3] y) { y = ConvInteger<group=2>(x, w) }",
        splits=".. -> 2, 0. -> 0, 10 -> 1, 2. -> 2",
    ),
    "QLinearConv": RuleCase(
        """(uint8[2,4,6,5] x, float sx, uint8 zx, int8[8,4,3,3] w, float[8] sw, int8[8] zw, float sy, uint8 zy,
            int32[8] b) => (uint8[2,8,6,5] y) { y = QLinearConv<pads=[1,1,1,1]>(x, sx, zx, w, sw, zw, sy, zy, b) }""",
        splits="......... -> 2, ...000..0 -> 1, 0........ -> 0, 2........ -> 2",
        feeds={"zw": np.zeros(8, np.int8)},
    ),
    "QLinearConv, groups": RuleCase(
        """(uint8[2,4,6,5] x, float sx, uint8 zx, uint8[4,1,3,3] w, float sw, uint8 zw, float sy, uint8 zy)
        => (uint8[2,4,4,3] y) { y = QLinearConv<group=4>(x, sx, zx, w, sw, zw, sy, zy) }""",
        splits="........ -> 2, 0....... -> 0, 1..0.... -> 1, 2....... -> 2",
    ),
    "DeformConv": RuleCase(
        """(float[2,2,4,4] x, float[4,2,2,2] w, float[2,8,3,3] o, float[4] b, float[2,4,3,3] m) => (float[2,4,3,3] y) {
            y = DeformConv(x, w, o, b, m) }""",
        splits=".0.0. -> 1, 0.0.0 -> 0",
    ),
    "MaxPool": RuleCase(
        """(float[2,4,7,6] x) => (float[2,4,4,3] y) {
            y = MaxPool<kernel_shape=[3,2],strides=[2,2],pads=[1,0,1,0]>(x) }""",
        splits=". -> 2, 0 -> 0, 1 -> 1, 2 -> 2",
    ),
    "MaxPool, rounded up": RuleCase(
        """(float[1,1,10,7] x) => (float[1,1,5,4] y) {
            y = MaxPool<kernel_shape=[3,3],strides=[2,2],ceil_mode=1>(x) }""",
        splits=". -> 2, 2 -> 2",
    ),
    "MaxPool, indices": RuleCase(
        "(float[2,4,7,6] x) => (float[2,4,6,5] y, int64[2,4,6,5] i) { y, i = MaxPool<kernel_shape=[2,2]>(x) }"
    ),
    "MaxPool, dilations": RuleCase(
        """(float[1,1,12] x) => (float[1,1,12] y) {
            y = MaxPool<kernel_shape=[3],dilations=[2],pads=[2,2]>(x) }""",
        splits=". -> 2, 2 -> 2",
    ),
    "AveragePool": RuleCase(
        """(float[1,2,7,6] x) => (float[1,2,4,6] y) {
            y = AveragePool<kernel_shape=[3,3],strides=[2,1],pads=[1,1,1,1]>(x) }""",
        splits=". -> 2, 1 -> 1, 2 -> 2",
    ),
    "AveragePool, padding counted": RuleCase(
        """(float[1,2,7,6] x) => (float[1,2,4,6] y) {
            y = AveragePool<kernel_shape=[3,3],strides=[2,1],pads=[1,1,1,1],count_include_pad=1>(x) }""",
        splits=". -> 2, 1 -> 1, 2 -> 2",
    ),
    "AveragePool, rounded up": RuleCase(
        """(float[1,1,10,7] x) => (float[1,1,5,4] y) {
            y = AveragePool<kernel_shape=[3,3],strides=[2,2],ceil_mode=1>(x) }""",
        splits=". -> 2, 2 -> 2",
    ),
    "AveragePool, rounded up and counted": RuleCase(
        """(float[1,1,10,7] x) => (float[1,1,6,4] y) {
            y = AveragePool<kernel_shape=[3,3],strides=[2,2],pads=[1,1,1,1],ceil_mode=1,count_include_pad=1>(x) }"""
    ),
    "LpPool": RuleCase(
        "(float[2,2,7,6] x) => (float[2,2,6,5] y) { y = LpPool<kernel_shape=[2,2],p=3>(x) }",
        splits=". -> 2, 0 -> 0, 1 -> 1, 2 -> 2",
    ),
    "GlobalAveragePool": RuleCase(
        "(float[2,4,5,6] x) => (float[2,4,1,1] y) { y = GlobalAveragePool(x) }", splits="0 -> 0, 1 -> 1, 2 -> +, 3 -> +"
    ),
    "GlobalMaxPool": RuleCase(
        "(float[2,4,5,6] x) => (float[2,4,1,1] y) { y = GlobalMaxPool(x) }", splits="0 -> 0, 1 -> 1"
    ),
    "GlobalLpPool": RuleCase(
        "(float[2,4,5,6] x) => (float[2,4,1,1] y) { y = GlobalLpPool(x) }", splits="0 -> 0, 1 -> 1"
    ),
    "QLinearAveragePool": RuleCase(
        """(uint8[2,4,6,5] x, float sx, uint8 zx, float sy, uint8 zy) => (uint8[2,4,5,4] y) {
            y = com.microsoft.QLinearAveragePool<kernel_shape=[2,2]>(x, sx, zx, sy, zy) }""",
        splits="0.... -> 0, 1.... -> 1",
    ),
    "QLinearGlobalAveragePool": RuleCase(
        """(uint8[2,4,6,5] x, float sx, uint8 zx, float sy, uint8 zy) => (uint8[2,4,1,1] y) {
            y = com.microsoft.QLinearGlobalAveragePool(x, sx, zx, sy, zy) }""",
        splits="0.... -> 0, 1.... -> 1",
    ),
    "RoiAlign": RuleCase(
        """(float[2,4,6,6] x, float[5,4] r, int64[5] b) => (float[5,4,2,2] y) {
            y = RoiAlign<output_height=2,output_width=2>(x, r, b) }""",
        splits=".00 -> 0, 1.. -> 1",
        opset=16,
        feeds={"b": i64(0, 1, 0, 1, 0)},
    ),
    "GridSample": RuleCase(
        "(float[2,4,5,6] x, float[2,3,4,2] g) => (float[2,4,3,4] y) { y = GridSample(x, g) }",
        splits=".1 -> 2, .2 -> 3, 00 -> 0, 1. -> 1",
    ),
    "LRN": RuleCase("(float[2,6,4,4] x) => (float[2,6,4,4] y) { y = LRN<size=3>(x) }", splits="0 -> 0, 2 -> 2, 3 -> 3"),
}

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
}

REDUCTIONS = {
    "TopK": RuleCase(
        "(float[4,6] x) => (float[4,2] y, int64[4,2] i) <int64[1] k = {2}> { y, i = TopK(x, k) }",
        splits="0. -> 00",
    ),
    "ArgMax": RuleCase(
        "(float[4,6,2] x) => (int64[4,2] y) { y = ArgMax<axis=1,keepdims=0>(x) }", splits="0 -> 0, 2 -> 1"
    ),
    "ArgMin": RuleCase("(float[4,6,2] x) => (int64[4,1,2] y) { y = ArgMin<axis=-2>(x) }", splits="0 -> 0, 2 -> 2"),
    "CumSum": RuleCase(
        "(float[4,6] x) => (float[4,6] y) <int64 a = {-1}> { y = CumSum<reverse=1>(x, a) }", splits="0. -> 0"
    ),
    "CumSum, computed axis": RuleCase(
        "(float[4,6] x, int64 a) => (float[4,6] y) { y = CumSum(x, a) }", feeds={"a": np.int64(1)}
    ),
    "ReduceSum": RuleCase(
        "(float[4,6,2] x) => (float[4,2] y) <int64[1] a = {-2}> { y = ReduceSum<keepdims=0>(x, a) }",
        splits="0. -> 0, 1. -> +, 2. -> 1",
    ),
    "ReduceSum, integers": RuleCase("(int64[4,6] x) => (int64[1,1] y) { y = ReduceSum(x) }", splits="0 -> +, 1 -> +"),
    "ReduceSum, nothing": RuleCase(
        "(float[4,6] x) => (float[4,6] y) <int64[0] a = {}> { y = ReduceSum<noop_with_empty_axes=1>(x, a) }",
        splits="0. -> 0, 1. -> 1",
    ),
    "ReduceMean": RuleCase(
        "(float[4,6,2] x) => (float[4,1,2] y) { y = ReduceMean<axes=[1]>(x) }",
        splits="0 -> 0, 1 -> +, 2 -> 2",
        opset=13,
    ),
    "ReduceMean, integers": RuleCase(
        "(int32[4,6] x) => (int32[4,1] y) { y = ReduceMean<axes=[1]>(x) }", splits="0 -> 0", opset=13
    ),
    "ReduceMax": RuleCase(
        "(float[4,6] x) => (float[4,1] y) <int64[1] a = {1}> { y = ReduceMax(x, a) }", splits="0. -> 0"
    ),
    "ReduceMin": RuleCase(
        "(float[4,6] x) => (float[6] y) <int64[1] a = {0}> { y = ReduceMin<keepdims=0>(x, a) }", splits="1. -> 0"
    ),
    "ReduceProd": RuleCase(
        "(float[4,6] x) => (float[4,1] y) <int64[1] a = {1}> { y = ReduceProd(x, a) }", splits="0. -> 0"
    ),
    "ReduceL1": RuleCase(
        "(float[4,6] x) => (float[4,1] y) <int64[1] a = {1}> { y = ReduceL1(x, a) }", splits="0. -> 0, 1. -> +"
    ),
    "ReduceL2": RuleCase(
        "(float[4,6] x) => (float[4,1] y) <int64[1] a = {1}> { y = ReduceL2(x, a) }", splits="0. -> 0"
    ),
    "ReduceSumSquare": RuleCase(
        "(float[4,6] x) => (float[4,1] y) <int64[1] a = {1}> { y = ReduceSumSquare(x, a) }", splits="0. -> 0, 1. -> +"
    ),
    "ReduceLogSumExp": RuleCase(
        "(float[4,6] x) => (float[4,1] y) <int64[1] a = {1}> { y = ReduceLogSumExp(x, a) }", splits="0. -> 0"
    ),
    "ReduceLogSum": RuleCase(
        "(float[4,6] x) => (float[4,1] y) <int64[1] a = {1}> { y = ReduceLogSum(x, a) }",
        splits="0. -> 0",
        feeds={"x": np.arange(1, 25, dtype=np.float32).reshape(4, 6)},
    ),
}

MOVES = {
    "Transpose": RuleCase(
        "(float[4,6,2] x) => (float[2,4,6] y) { y = Transpose<perm=[2,0,1]>(x) }", splits="0 -> 1, 1 -> 2, 2 -> 0"
    ),
    "Slice": RuleCase(
        """(float[4,6] x) => (float[4,2] y) <int64[1] s = {1}, int64[1] e = {-3}, int64[1] a = {-1}> {
            y = Slice(x, s, e, a) }""",
        splits="0... -> 0",
    ),
    "Slice, opset 9": RuleCase(
        "(float[4,6] x) => (float[2,6] y) { y = Slice<starts=[1],ends=[3]>(x) }", splits="1 -> 1", opset=9
    ),
    "Pad": RuleCase(
        """(float[4,6] x) => (float[4,9] y) <int64[4] p = {0,1,0,2}> { y = Pad<mode="reflect">(x, p) }""",
        splits="0. -> 0",
    ),
    "Pad, axes": RuleCase(
        "(float[4,6] x) => (float[4,5] y) <int64[2] p = {-2,1}, int64[1] a = {-1}> { y = Pad(x, p, , a) }",
        splits="0.-. -> 0",
    ),
    "Tile": RuleCase("(float[4,3] x) => (float[4,6] y) <int64[2] r = {1,2}> { y = Tile(x, r) }", splits="0. -> 0"),
    "Expand": RuleCase(
        "(float[1,6] x) => (float[4,6] y) <int64[2] s = {4,6}> { y = Expand(x, s) }", splits=".. -> 0, 1. -> 1"
    ),
    "Expand, fewer axes": RuleCase(
        "(float[4,1] x) => (float[4,6] y) <int64[1] s = {6}> { y = Expand(x, s) }", splits=".. -> 1, 0. -> 0"
    ),
    "Expand, ones": RuleCase(
        "(float[4,6] x) => (float[3,4,6] y) <int64[3] s = {3,1,1}> { y = Expand(x, s) }",
        splits=".. -> 0, 0. -> 1, 1. -> 2",
    ),
    "Resize, scales": RuleCase(
        '(float[2,4,3,3] x) => (float[2,4,6,6] y) <float[4] s = {1,1,2,2}> { y = Resize<mode="linear">(x, , s) }',
        splits="0-. -> 0, 1-. -> 1",
    ),
    "Resize, scale beside 1": RuleCase(
        "(float[2,4,3,3] x) => (float[2,4,6,6] y) <float[4] s = {1.2,1,2,2}> { y = Resize(x, , s) }", splits="1-. -> 1"
    ),
    "Resize, sizes": RuleCase(
        "(float[2,4,3,3] x) => (float[2,4,5,7] y) <int64[4] s = {2,4,5,7}> { y = Resize(x, , , s) }",
        splits="0--. -> 0, 1--. -> 1",
    ),
    "Resize, sizes of some axes": RuleCase(
        "(float[2,4,3,3] x) => (float[2,4,5,7] y) <int64[2] s = {5,7}> { y = Resize<axes=[2,3]>(x, , , s) }",
        splits="0--. -> 0, 1--. -> 1",
    ),
    "Resize, shared scale": RuleCase(
        """(float[2,4,3,3] x) => (float[2,4,3,3] y) <int64[2] s = {3,4}> {
            y = Resize<axes=[2,3],keep_aspect_ratio_policy="not_larger">(x, , , s) }""",
        splits="0--. -> 0, 1--. -> 1",
    ),
    "Resize, opset 10": RuleCase(
        "(float[2,4,3,3] x) => (float[2,4,6,6] y) <float[4] s = {1,1,2,2}> { y = Resize(x, s) }",
        splits="0. -> 0, 1. -> 1",
        opset=10,
    ),
    "Upsample": RuleCase(
        "(float[2,4,3,3] x) => (float[2,4,6,6] y) <float[4] s = {1,1,2,2}> { y = Upsample(x, s) }",
        splits="0. -> 0, 1. -> 1",
        opset=9,
    ),
    "DepthToSpace": RuleCase(
        "(float[2,16,4,2] x) => (float[2,4,8,4] y) { y = DepthToSpace<blocksize=2>(x) }",
        splits="0 -> 0, 2 -> 2, 3 -> 3",
    ),
    "DepthToSpace, CRD": RuleCase(
        '(float[2,16,4,2] x) => (float[2,4,8,4] y) { y = DepthToSpace<blocksize=2,mode="CRD">(x) }',
        splits="0 -> 0, 1 -> 1, 2 -> 2, 3 -> 3",
    ),
    "SpaceToDepth": RuleCase(
        "(float[2,4,8,4] x) => (float[2,16,4,2] y) { y = SpaceToDepth<blocksize=2>(x) }",
        splits="0 -> 0, 2 -> 2, 3 -> 3",
    ),
    "Trilu": RuleCase("(float[2,3,4,4] x) => (float[2,3,4,4] y) { y = Trilu<upper=0>(x) }", splits="0 -> 0, 1 -> 1"),
    "Det": RuleCase("(float[2,3,4,4] x) => (float[2,3] y) { y = Det(x) }", splits="0 -> 0, 1 -> 1"),
    "ReverseSequence": RuleCase(
        "(float[4,6,2] x, int64[6] n) => (float[4,6,2] y) { y = ReverseSequence(x, n) }",
        splits="10 -> 1, 2. -> 2",
        feeds={"n": i64(1, 2, 3, 4, 1, 2)},
    ),
    "Split": RuleCase(
        "(float[4,6] x) => (float[4,3] y, float[4,3] z) { y, z = Split<axis=-1,num_outputs=2>(x) }",
        splits="0 -> 00, 1 -> 11",
    ),
    "Split, unequal": RuleCase(
        "(float[4,6] x) => (float[4,2] y, float[4,4] z) <int64[2] s = {2,4}> { y, z = Split<axis=1>(x, s) }",
        splits="0. -> 00",
    ),
    "Split, opset 11": RuleCase(
        "(float[4,12] x) => (float[4,4] y, float[4,4] z, float[4,4] w) { y, z, w = Split<axis=1,split=[4,4,4]>(x) }",
        splits="0 -> 000, 1 -> 111",
        opset=11,
    ),
    "Concat": RuleCase("(float[4,6] a, float[4,2] b) => (float[4,8] y) { y = Concat<axis=1>(a, b) }", splits="00 -> 0"),
    "Concat, equal": RuleCase(
        "(float[4,6] a, float[4,6] b) => (float[4,12] y) { y = Concat<axis=-1>(a, b) }", splits="00 -> 0, 11 -> 1"
    ),
    "QLinearConcat": RuleCase(
        """(float s, uint8 z, uint8[4,6] a, float sa, uint8 za, uint8[4,2] b, float sb, uint8 zb) => (uint8[4,8] y) {
            y = com.microsoft.QLinearConcat<axis=1>(s, z, a, sa, za, b, sb, zb) }""",
        splits="..0..0.. -> 0",
    ),
    "Reshape": RuleCase(
        "(float[4,6] x) => (float[4,3,2] y) <int64[3] s = {0,3,-1}> { y = Reshape(x, s) }",
        splits="0. -> 0, 1. -> 1, 1. -> 2",
    ),
    "Reshape, merge": RuleCase(
        "(float[4,6,2] x) => (float[4,12] y) <int64[2] s = {-1,12}> { y = Reshape(x, s) }",
        splits="0. -> 0, 1. -> 1, 2. -> 1",
    ),
    "Flatten": RuleCase("(float[4,3,2] x) => (float[4,6] y) { y = Flatten(x) }", splits="0 -> 0, 1 -> 1, 2 -> 1"),
    "Squeeze": RuleCase("(float[4,1,6] x) => (float[4,6] y) { y = Squeeze(x) }", splits="0 -> 0, 2 -> 1"),
    "Unsqueeze": RuleCase(
        "(float[4,6] x) => (float[4,1,6] y) <int64[1] a = {1}> { y = Unsqueeze(x, a) }", splits="0. -> 0, 1. -> 2"
    ),
    "Shape": RuleCase("(float[4,6] x) => (int64[1] y) { y = Shape<start=-2,end=1>(x) }", splits="0 -> ., 1 -> ."),
    "Gather": RuleCase(
        "(float[4,6] x, int64[2,3] i) => (float[4,2,3] y) { y = Gather<axis=-1>(x, i) }",
        splits=".0 -> 1, .1 -> 2, 0. -> 0",
    ),
    "Gather, one index": RuleCase(
        "(float[4,6,2] x, int64 i) => (float[4,2] y) { y = Gather<axis=1>(x, i) }", splits="0. -> 0, 2. -> 1"
    ),
    "GatherElements": RuleCase(
        "(float[4,6] x, int64[4,3] i) => (float[4,3] y) { y = GatherElements<axis=1>(x, i) }", splits=".1 -> 1, 00 -> 0"
    ),
    "GatherElements, fewer": RuleCase(
        "(float[4,6] x, int64[2,3] i) => (float[2,3] y) { y = GatherElements<axis=1>(x, i) }", splits=".1 -> 1"
    ),
    "GatherND": RuleCase(
        "(float[4,3,5,6] x, int64[4,2,1] i) => (float[4,2,5,6] y) { y = GatherND<batch_dims=1>(x, i) }",
        splits=".1 -> 1, 00 -> 0, 2. -> 2, 3. -> 3",
        feeds={"i": i64(0, 1, 2, 0, 1, 2, 0, 1).reshape(4, 2, 1)},
    ),
    "ScatterElements": RuleCase(
        "(float[4,6] x, int64[4,3] i, float[4,3] u) => (float[4,6] y) { y = ScatterElements<axis=1>(x, i, u) }",
        splits="000 -> 0",
        feeds={"i": i64(0, 1, 2, 2, 1, 0, 0, 2, 4, 1, 3, 5).reshape(4, 3)},
    ),
    "ScatterElements, fewer": RuleCase(
        "(float[4,6] x, int64[2,3] i, float[2,3] u) => (float[4,6] y) { y = ScatterElements<axis=1>(x, i, u) }",
        feeds={"i": i64(0, 1, 2, 2, 1, 0).reshape(2, 3)},
    ),
    "ScatterND": RuleCase(
        """(float[4,6,2] x, int64[3,1] i, float[3,6,2] u) => (float[4,6,2] y) {
            y = ScatterND<reduction="add">(x, i, u) }""",
        splits="1.1 -> 1, 2.2 -> 2",
    ),
    "TensorScatter": RuleCase(
        """(float[4,2,8,6] x, float[4,2,3,6] u, int64[4] i) => (float[4,2,8,6] y) { y = TensorScatter(x, u, i) }""",
        splits="000 -> 0, 11. -> 1, 33. -> 3",
        opset=24,
    ),
    "OneHot": RuleCase(
        "(int64[4,3] i) => (float[4,5,3] y) <int64 d = {5}, float[2] v = {0,1}> { y = OneHot<axis=1>(i, d, v) }",
        splits="0.. -> 0, 1.. -> 2",
    ),
    "GatherBlockQuantized": RuleCase(
        """(uint8[6,16] x, int64[4] i, float[6,2] s) => (float[4,32] y) {
            y = com.microsoft.GatherBlockQuantized<bits=4,block_size=16,quantize_axis=1>(x, i, s) }""",
        splits=".0. -> 0",
    ),
}

POINTWISE = {
    "Add": RuleCase("(float[4,6] a, float[6] b) => (float[4,6] y) { y = Add(a, b) }", splits="0. -> 0, 10 -> 1"),
    "Where": RuleCase(
        "(bool[4,1] c, float[6] a, float b) => (float[4,6] y) { y = Where(c, a, b) }", splits=".0. -> 1, 0.. -> 0"
    ),
    "Clip": RuleCase(
        "(float[4,6] x, float l, float h) => (float[4,6] y) { y = Clip(x, l, h) }", splits="0.. -> 0, 1.. -> 1"
    ),
    "PRelu": RuleCase(
        "(float[4,6,2] x, float[6,1] s) => (float[4,6,2] y) { y = PRelu(x, s) }", splits="0. -> 0, 10 -> 1, 2. -> 2"
    ),
    "CastLike": RuleCase(
        "(float[4,6] x, int32[4] t) => (int32[4,6] y) { y = CastLike(x, t) }", splits="0. -> 0, 1. -> 1"
    ),
    "Dropout": RuleCase(
        "(float[4,6] x) => (float[4,6] y, bool[4,6] m) { y, m = Dropout(x) }", splits="0 -> 00, 1 -> 11"
    ),
    "QuantizeLinear": RuleCase(
        "(float[4,6] x, float[6] s, int8[6] z) => (int8[4,6] y) { y = QuantizeLinear(x, s, z) }",
        splits="0.. -> 0, 100 -> 1",
    ),
    "DequantizeLinear, one scale": RuleCase(
        "(int8[4,6] x, float s) => (float[4,6] y) { y = DequantizeLinear(x, s) }", splits="0. -> 0, 1. -> 1"
    ),
    "DequantizeLinear, blocks": RuleCase(
        """(int8[4,12] x, float[4,6] s, int8[4,6] z) => (float[4,12] y) {
            y = DequantizeLinear<axis=1,block_size=2>(x, s, z) }""",
        splits="000 -> 0, 111 -> 1",
    ),
    "DynamicQuantizeLinear": RuleCase(
        "(float[4,6] x) => (uint8[4,6] y, float s, uint8 z) { y, s, z = DynamicQuantizeLinear(x) }"
    ),
    "BiasGelu": RuleCase(
        "(float[4,6] x, float[6] b) => (float[4,6] y) { y = com.microsoft.BiasGelu(x, b) }", splits="0. -> 0, 10 -> 1"
    ),
    "FastGelu": RuleCase(
        "(float[4,6] x, float[6] b) => (float[4,6] y) { y = com.microsoft.FastGelu(x, b) }", splits="0. -> 0, 10 -> 1"
    ),
    "QuickGelu": RuleCase(
        "(float[4,6] x) => (float[4,6] y) { y = com.microsoft.QuickGelu(x) }", splits="0 -> 0, 1 -> 1"
    ),
    "QLinearAdd": RuleCase(
        """(uint8[4,6] a, float sa, uint8 za, uint8[6] b, float sb, uint8 zb, float s, uint8 z) => (uint8[4,6] y) {
            y = com.microsoft.QLinearAdd(a, sa, za, b, sb, zb, s, z) }""",
        splits="0....... -> 0, 1..0.... -> 1",
    ),
    "QLinearMul": RuleCase(
        """(int8[4,6] a, float sa, int8 za, int8[4,6] b, float sb, int8 zb, float s, int8 z) => (int8[4,6] y) {
            y = com.microsoft.QLinearMul(a, sa, za, b, sb, zb, s, z) }""",
        splits="0..0.... -> 0, 1..1.... -> 1",
    ),
    "QLinearSigmoid": RuleCase(
        """(uint8[4,6] a, float sa, uint8 za, float s, uint8 z) => (uint8[4,6] y) {
            y = com.microsoft.QLinearSigmoid(a, sa, za, s, z) }""",
        splits="0.... -> 0, 1.... -> 1",
    ),
    "QLinearLeakyRelu": RuleCase(
        """(uint8[4,6] a, float sa, uint8 za, float s, uint8 z) => (uint8[4,6] y) {
            y = com.microsoft.QLinearLeakyRelu<alpha=0.1>(a, sa, za, s, z) }""",
        splits="0.... -> 0, 1.... -> 1",
    ),
    "NonZero": RuleCase("(float[4,6] x) => (int64[2,n] y) { y = NonZero(x) }"),
    "scalars": RuleCase("(float a, float b) => (float y) { y = Add(a, b) }"),
    "no elements": RuleCase("(float[0,6] a, float[6] b) => (float[0,6] y) { y = Add(a, b) }", splits="10 -> 1"),
    "scalar, Softmax": RuleCase("(float x) => (float y) { y = Exp(x) }"),
}

ATTENTION = {
    "Attention, 4 axes": RuleCase(
        """(float[2,4,3,6] q, float[2,2,5,6] k, float[2,2,5,8] v, float[4,3,5] m) => (float[2,4,3,8] y) {
            y = Attention<softcap=2.0>(q, k, v, m) }""",
        splits="000. -> 0, 1110 -> 1, 2..1 -> 2",
        opset=23,
    ),
    "Attention, 3 axes": RuleCase(
        """(float[2,3,24] q, float[2,5,12] k, float[2,5,12] v, bool[3,5] m) => (float[2,3,24] y) {
            y = Attention<q_num_heads=4,kv_num_heads=2>(q, k, v, m) }""",
        splits="000. -> 0, 1..0 -> 1, 222. -> 2",
        opset=23,
        feeds={"m": np.tri(3, 5, 2, dtype=bool)},
    ),
    "Attention, one head of keys": RuleCase(
        """(float[2,3,24] q, float[2,5,6] k, float[2,5,6] v) => (float[2,3,24] y) {
            y = Attention<q_num_heads=4,kv_num_heads=1>(q, k, v) }""",
        splits="000 -> 0, 1.. -> 1, 2.. -> 2",
        opset=23,
    ),
    "Attention, past": RuleCase(
        """(float[2,2,3,6] q, float[2,2,3,6] k, float[2,2,3,6] v, float[2,1,3,7] m, float[2,2,4,6] a, float[2,2,4,6] b)
        => (float[2,2,3,6] y, float[2,2,7,6] c, float[2,2,7,6] d, float[2,2,3,7] p) {
            y, c, d, p = Attention<is_causal=1,qk_matmul_output_mode=1>(q, k, v, m, a, b) }""",
        splits="000000 -> 0000, 111.11 -> 1111",
        opset=23,
    ),
    "Attention, product": RuleCase(
        """(float[2,2,4,6] q, float[2,2,5,6] k, float[2,2,5,6] v, float[4,5] m)
        => (float[2,2,4,6] y, float[2,2,4,5] p) { y, , , p = Attention(q, k, v, m) }""",
        splits="000. -> 0--0, 111. -> 1--1, 2..0 -> 2--2",
        opset=23,
    ),
    "Attention, lengths": RuleCase(
        """(float[2,2,3,6] q, float[2,2,5,6] k, float[2,2,5,6] v, int64[2] n) => (float[2,2,3,6] y) {
            y = Attention(q, k, v, , , , n) }""",
        splits="000---0 -> 0, 111---. -> 1",
        opset=24,
        feeds={"n": i64(3, 5)},
    ),
    "RotaryEmbedding, 4 axes": RuleCase(
        "(float[2,4,3,8] x, float[2,3,4] c, float[2,3,4] s) => (float[2,4,3,8] y) { y = RotaryEmbedding(x, c, s) }",
        splits="000 -> 0, 1.. -> 1, 211 -> 2",
        opset=23,
    ),
    "RotaryEmbedding, 3 axes": RuleCase(
        """(float[2,3,32] x, float[9,4] c, float[9,4] s, int64[2,3] i) => (float[2,3,32] y) {
            y = RotaryEmbedding<num_heads=4,interleaved=1>(x, c, s, i) }""",
        splits="0..0 -> 0, 1..1 -> 1, 2... -> 2",
        opset=23,
    ),
    "RotaryEmbedding, Microsoft": RuleCase(
        """(float[2,3,32] x, int64[2,3] i, float[9,4] c, float[9,4] s) => (float[2,3,32] y) {
            y = com.microsoft.RotaryEmbedding(x, i, c, s) }""",
        splits="00.. -> 0, 11.. -> 1, 2... -> 2",
    ),
    "RotaryEmbedding, Microsoft, 4 axes": RuleCase(
        """(float[2,4,3,8] x, int64[1] i, float[9,2] c, float[9,2] s) => (float[2,4,3,8] y) {
            y = com.microsoft.RotaryEmbedding<rotary_embedding_dim=4,num_heads=4>(x, i, c, s) }""",
        splits="0... -> 0, 1... -> 1",
    ),
    "Attention, Microsoft": RuleCase(
        """(float[2,3,16] x, float[16,48] w, float[48] b, int32[2,3] m) => (float[2,3,16] y) {
            y = com.microsoft.Attention<num_heads=4>(x, w, b, m) }""",
        splits=".10. -> 2, 0..0 -> 0",
        feeds={"m": i32([[1, 1, 0], [1, 1, 1]])},
    ),
    "Attention, Microsoft, past": RuleCase(
        """(float[2,3,16] x, float[16,48] w, float[48] b, float[2,2,4,5,4] p)
        => (float[2,3,16] y, float[2,2,4,8,4] q) {
            y, q = com.microsoft.Attention<num_heads=4,unidirectional=1>(x, w, b, , p) }""",
        splits=".10-2 -> 22, 0..-1 -> 01",
    ),
    "Attention, Microsoft, ends and starts": RuleCase(
        """(float[2,3,16] x, float[16,48] w, float[48] b, int32[4] m, float[1,4,3,3] a) => (float[2,3,16] y) {
            y = com.microsoft.Attention<num_heads=4,qkv_hidden_sizes=[16,16,16]>(x, w, b, m, , a) }""",
        splits=".10.-1 -> 2, 0..0-. -> 0",
        feeds={"m": i32([3, 2, 1, 0])},
    ),
    "Attention, Microsoft, unequal": RuleCase(
        """(float[2,3,16] x, float[16,40] w, float[40] b) => (float[2,3,8] y) {
            y = com.microsoft.Attention<num_heads=4,qkv_hidden_sizes=[16,16,8]>(x, w, b) }""",
        splits="0.. -> 0",
    ),
    "QAttention": RuleCase(
        """(uint8[2,3,16] x, int8[16,48] w, float[48] b, float sx, float sw, int32[2] m, uint8 zx, int8 zw)
        => (float[2,3,16] y) { y = com.microsoft.QAttention<num_heads=4>(x, w, b, sx, sw, m, zx, zw) }""",
        splits=".10..... -> 2, 0....0.. -> 0",
        feeds={"m": i32([2, 3])},
    ),
    "MultiHeadAttention": RuleCase(
        """(float[2,3,16] q, float[2,5,16] k, float[2,5,16] v, float[48] b, int32[2,5] m, float[2,4,3,5] a)
        => (float[2,3,16] y) { y = com.microsoft.MultiHeadAttention<num_heads=4>(q, k, v, b, m, a) }""",
        splits="000.00 -> 0, 1....2 -> 1, 2220.1 -> 2",
        feeds={"m": i32([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])},
    ),
    "MultiHeadAttention, past": RuleCase(
        """(float[2,3,16] q, float[2,3,16] k, float[2,3,16] v, float[2,4,5,4] p, float[2,4,5,4] r)
        => (float[2,3,16] y, float[2,4,8,4] s, float[2,4,8,4] t) {
            y, s, t = com.microsoft.MultiHeadAttention<num_heads=4,unidirectional=1>(q, k, v, , , , p, r) }""",
        splits="000---00 -> 000, 222---11 -> 211",
    ),
    "MultiHeadAttention, keys by heads": RuleCase(
        """(float[2,3,16] q, float[2,4,5,4] k, float[2,4,5,4] v) => (float[2,3,16] y) {
            y = com.microsoft.MultiHeadAttention<num_heads=4>(q, k, v) }""",
        splits="000 -> 0, 1.. -> 1, 211 -> 2",
    ),
    "GroupQueryAttention": RuleCase(
        """(float[2,3,64] q, float[2,3,32] k, float[2,3,32] v, float[2,2,0,16] p, float[2,2,0,16] r, int32[2] n,
            float[9,8] c, float[9,8] s) => (float[2,3,64] y, float[2,2,3,16] a, float[2,2,3,16] b) <int32 t = {3}> {
            y, a, b = com.microsoft.GroupQueryAttention<num_heads=4,kv_num_heads=2,do_rotary=1,softcap=3.0>
                (q, k, v, p, r, n, t, c, s) }""",
        splits="000000... -> 000, 22211.... -> 211",
        feeds={"n": i32([2, 1])},
    ),
    "GroupQueryAttention, one token": RuleCase(
        """(float[2,1,32] q, float[2,1,16] k, float[2,1,16] v, float[2,2,4,8] p, float[2,2,4,8] r, int32[2] n, int32 t)
        => (float[2,1,32] y, float[2,2,5,8] a, float[2,2,5,8] b) {
            y, a, b = com.microsoft.GroupQueryAttention<num_heads=4,kv_num_heads=2>(q, k, v, p, r, n, t) }""",
        splits="000000. -> 000, 22211.. -> 211",
        feeds={"n": i32([3, 4]), "t": i32(5)},
    ),
    "GroupQueryAttention, packed": RuleCase(
        """(float[2,1,64] q, float[2,2,4,8] p, float[2,2,4,8] r, int32[2] n)
        => (float[2,1,32] y, float[2,2,5,8] a, float[2,2,5,8] b) <int32 t = {5}> {
            y, a, b = com.microsoft.GroupQueryAttention<num_heads=4,kv_num_heads=2>(q, , , p, r, n, t) }""",
        splits="0--000. -> 000",
        feeds={"n": i32([4, 4])},
    ),
    "GroupQueryAttention, packed equally": RuleCase(
        """(float[2,1,96] q, float[2,4,4,8] p, float[2,4,4,8] r, int32[2] n, float[1,4,1,5] m)
        => (float[2,1,32] y, float[2,4,5,8] a, float[2,4,5,8] b) <int32 t = {5}> {
            y, a, b = com.microsoft.GroupQueryAttention<num_heads=4,kv_num_heads=4>
                (q, , , p, r, n, t, , , , m) }""",
        splits="0--000.---. -> 000, 2--11..---1 -> 211",
        feeds={"n": i32([4, 3])},
    ),
}

RECURRENT = {
    "LSTM": RuleCase(
        """(float[3,4,5] x, float[1,24,5] w, float[1,24,6] r, float[1,48] b, int32[4] n, float[1,4,6] h, float[1,4,6] c,
            float[1,18] p) => (float[3,1,4,6] y, float[1,4,6] u, float[1,4,6] v) {
            y, u, v = LSTM<hidden_size=6>(x, w, r, b, n, h, c, p) }""",
        splits="1...011. -> 211",
        feeds={"n": i32([3, 1, 2, 3])},
    ),
    "LSTM, two directions": RuleCase(
        """(float[3,4,5] x, float[2,24,5] w, float[2,24,6] r, float[2,48] b, float[2,4,6] h, float[2,4,6] c)
        => (float[3,2,4,6] y, float[2,4,6] u) {
            y, u = LSTM<hidden_size=6,direction="bidirectional",
                activations=["Sigmoid","Tanh","Tanh","Sigmoid","Softsign","Tanh"]>(x, w, r, b, , h, c) }""",
        splits=".000-00 -> 10, 1...-11 -> 21",
    ),
    "GRU": RuleCase(
        """(float[3,4,5] x, float[2,18,5] w, float[2,18,6] r, float[2,36] b, int32[4] n, float[2,4,6] h)
        => (float[3,2,4,6] y, float[2,4,6] u) {
            y, u = GRU<hidden_size=6,direction="bidirectional",linear_before_reset=1>(x, w, r, b, n, h) }""",
        splits=".000.0 -> 10, 1...01 -> 21",
        feeds={"n": i32([3, 1, 2, 3])},
    ),
    "RNN": RuleCase(
        """(float[3,4,5] x, float[1,6,5] w, float[1,6,6] r) => (float[1,4,6] u) {
            , u = RNN<hidden_size=6,direction="reverse">(x, w, r) }""",
        splits="1.. -> -1",
    ),
}

CASES = {
    **PRODUCTS,
    **CONVOLUTIONS,
    **NORMALIZATIONS,
    **REDUCTIONS,
    **MOVES,
    **POINTWISE,
    **ATTENTION,
    **RECURRENT,
}
