"""Cases of convolutions and pools."""

import numpy as np

from tests.support.sharding_cases.rule_case import RuleCase, i64

CONVOLUTIONS = {
    "Conv": RuleCase(
        "(float[2,4,6,5] x, float[8,4,3,3] w, float[8] b) => (float[2,8,4,3] y) { y = Conv(x, w, b) }",
        splits=".00 -> 1, 0.. -> 0, 11. -> +, 2.. -> 2",
    ),
    "Conv, groups": RuleCase(
        """(float[2,8,6,5] x, float[8,2,3,3] w, float[8] b) => (float[2,8,6,5] y) {
            y = Conv<group=4,pads=[1,1,1,1]>(x, w, b) }""",
        splits="... -> 2, 0.. -> 0, 100 -> 1, 11. -> +, 2.. -> 2",
    ),
    "Conv, strides and dilations": RuleCase(
        """(float[1,3,11,9] x, float[4,3,3,2] w) => (float[1,4,5,5] y) {
            y = Conv<strides=[2,2],dilations=[2,1],pads=[1,1,2,1]>(x, w) }""",
        splits=".0 -> 1, 11 -> +, 2. -> 2",
    ),
    "Conv, 1-D": RuleCase(
        '(float[2,4,9] x, float[6,4,4] w) => (float[2,6,9] y) { y = Conv<auto_pad="SAME_LOWER">(x, w) }',
        splits=".. -> 2, .0 -> 1, 0. -> 0, 11 -> +, 2. -> 2",
    ),
    "Conv, 3-D": RuleCase(
        """(float[1,2,7,4,4] x, float[4,2,3,3,3] w) => (float[1,4,3,4,4] y) {
            y = Conv<pads=[0,1,1,0,1,1],strides=[2,1,1]>(x, w) }""",
        splits=".0 -> 1, 11 -> +, 2. -> 2",
    ),
    "ConvTranspose": RuleCase(
        """(float[2,4,5,3] x, float[4,6,3,3] w, float[6] b) => (float[2,6,10,5] y) {
            y = ConvTranspose<strides=[2,1],pads=[1,0,1,0],output_padding=[1,0]>(x, w, b) }""",
        splits=".10 -> 1, 0.. -> 0, 10. -> +, 2.. -> 2",
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
        splits="0. -> 0, 10 -> 1, 2. -> 2",
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
        splits="0....... -> 0, 1..0.... -> 1, 2....... -> 2",
    ),
    "DeformConv": RuleCase(
        """(float[2,2,4,4] x, float[4,2,2,2] w, float[2,8,3,3] o, float[4] b, float[2,4,3,3] m) => (float[2,4,3,3] y) {
            y = DeformConv(x, w, o, b, m) }""",
        splits=".0.0. -> 1, 0.0.0 -> 0",
    ),
    "MaxPool": RuleCase(
        """(float[2,4,7,6] x) => (float[2,4,4,3] y) {
            y = MaxPool<kernel_shape=[3,2],strides=[2,2],pads=[1,0,1,0]>(x) }""",
        splits="0 -> 0, 1 -> 1, 2 -> 2",
    ),
    "MaxPool, rounded up": RuleCase(
        """(float[1,1,10,7] x) => (float[1,1,5,4] y) {
            y = MaxPool<kernel_shape=[3,3],strides=[2,2],ceil_mode=1>(x) }""",
        splits="2 -> 2",
    ),
    "MaxPool, indices": RuleCase(
        "(float[2,4,7,6] x) => (float[2,4,6,5] y, int64[2,4,6,5] i) { y, i = MaxPool<kernel_shape=[2,2]>(x) }"
    ),
    "MaxPool, dilations": RuleCase(
        """(float[1,1,12] x) => (float[1,1,12] y) {
            y = MaxPool<kernel_shape=[3],dilations=[2],pads=[2,2]>(x) }""",
        splits="2 -> 2",
    ),
    "AveragePool": RuleCase(
        """(float[1,2,7,6] x) => (float[1,2,4,6] y) {
            y = AveragePool<kernel_shape=[3,3],strides=[2,1],pads=[1,1,1,1]>(x) }""",
        splits="1 -> 1, 2 -> 2",
    ),
    "AveragePool, padding counted": RuleCase(
        """(float[1,2,7,6] x) => (float[1,2,4,6] y) {
            y = AveragePool<kernel_shape=[3,3],strides=[2,1],pads=[1,1,1,1],count_include_pad=1>(x) }""",
        splits="1 -> 1, 2 -> 2",
    ),
    "AveragePool, rounded up": RuleCase(
        """(float[1,1,10,7] x) => (float[1,1,5,4] y) {
            y = AveragePool<kernel_shape=[3,3],strides=[2,2],ceil_mode=1>(x) }""",
        splits="2 -> 2",
    ),
    "AveragePool, rounded up and counted": RuleCase(
        """(float[1,1,10,7] x) => (float[1,1,6,4] y) {
            y = AveragePool<kernel_shape=[3,3],strides=[2,2],pads=[1,1,1,1],ceil_mode=1,count_include_pad=1>(x) }""",
        splits="2 -> 2",
    ),
    "LpPool": RuleCase(
        "(float[2,2,7,6] x) => (float[2,2,6,5] y) { y = LpPool<kernel_shape=[2,2],p=3>(x) }",
        splits="0 -> 0, 1 -> 1, 2 -> 2",
    ),
    "AveragePool, one window": RuleCase(
        "(float[2,4,5,6] x) => (float[2,4,1,3] y) { y = AveragePool<kernel_shape=[5,2],strides=[2,2]>(x) }",
        splits="0 -> 0, 1 -> 1, 2 -> +",
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
    "QLinearConv, Microsoft": RuleCase(
        """(uint8[2,4,6,5] x, float sx, uint8 zx, uint8[8,4,3,3] w, float sw, uint8 zw, float sy, uint8 zy)
        => (uint8[2,8,4,3] y) { y = com.microsoft.QLinearConv(x, sx, zx, w, sw, zw, sy, zy) }""",
        splits="...0.... -> 1, 0....... -> 0",
    ),
}
