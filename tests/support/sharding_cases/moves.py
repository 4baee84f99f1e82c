"""Cases of operators that move elements."""

import numpy as np

from tests.support.sharding_cases.rule_case import RuleCase, i64

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
    "Resize, linear sequence": RuleCase(
        '(float[4,3,3] x) => (float[4,3,6] y) <float[3] s = {1,1,2}> { y = Resize<mode="linear">(x, , s) }'
    ),
    "Resize, cubic matrix": RuleCase(
        '(float[4,4] x) => (float[4,8] y) <int64[2] s = {4,8}> { y = Resize<mode="cubic">(x, , , s) }'
    ),
    "Resize, linear rows": RuleCase(
        '(float[2,4,3,3] x) => (float[2,4,6,3] y) <int64[4] s = {2,4,6,3}> { y = Resize<mode="linear">(x, , , s) }',
        splits="0--. -> 0, 1--. -> 1",
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
        splits=".00 -> +, 1.1 -> 1, 2.2 -> 2",
    ),
    "ScatterND, two axes of indices": RuleCase(
        """(float[4,6] x, int64[3,4,1] i, float[3,4,6] u) => (float[4,6] y) {
            y = ScatterND<reduction="add">(x, i, u) }""",
        splits=".00 -> +, .11 -> +, 1.2 -> 1",
    ),
    "ScatterND, replacing": RuleCase(
        "(float[6,2] x, int64[3,1] i, float[3,2] u) => (float[6,2] y) { y = ScatterND(x, i, u) }",
        splits="1.1 -> 1",
        feeds={"i": i64(0, 4, 2).reshape(3, 1)},
    ),
    "ScatterElements, adding": RuleCase(
        """(float[4,6] x, int64[4,3] i, float[4,3] u) => (float[4,6] y) {
            y = ScatterElements<axis=1,reduction="add">(x, i, u) }""",
        splits=".11 -> +, 000 -> 0",
    ),
    "ScatterElements, adding integers that wrap": RuleCase(
        """(int32[4,6] x, int64[4,3] i, int32[4,3] u) => (int32[4,6] y) {
            y = ScatterElements<axis=1,reduction="add">(x, i, u) }""",
        splits=".11 -> +, 000 -> 0",
        feeds={"x": np.full((4, 6), 2**30 + 1), "i": np.zeros((4, 3)), "u": np.full((4, 3), 2**30 + 1)},
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
    "GatherND, Microsoft": RuleCase(
        "(float[4,3,6] x, int64[5,1] i) => (float[5,3,6] y) { y = com.microsoft.GatherND(x, i) }",
        splits=".0 -> 0, 1. -> 1, 2. -> 2",
    ),
    "Trilu, Microsoft": RuleCase(
        "(float[2,4,4] x) => (float[2,4,4] y) { y = com.microsoft.Trilu(x) }", splits="0 -> 0"
    ),
    "Scatter": RuleCase(
        "(float[4,6] x, int64[4,3] i, float[4,3] u) => (float[4,6] y) { y = Scatter<axis=1>(x, i, u) }",
        splits="000 -> 0",
        opset=10,
        feeds={"i": i64(0, 1, 2, 2, 1, 0, 0, 2, 4, 1, 3, 5).reshape(4, 3)},
    ),
}
