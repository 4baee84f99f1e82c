"""Cases of reductions and Fourier transforms."""

import numpy as np

from tests.support.sharding_cases.rule_case import RuleCase

REDUCTIONS = {
    "DFT": RuleCase("(float[4,6,8,1] x) => (float[4,6,5,2] y) { y = DFT<onesided=1>(x) }", splits="0 -> 0, 1 -> 1"),
    "DFT, opset 19": RuleCase(
        "(float[4,6,8,1] x) => (float[4,6,8,2] y) { y = DFT(x) }", splits="0 -> 0, 2 -> 2", opset=19
    ),
    "DFT, inverse": RuleCase(
        """(float[4,6,8,2] x) => (float[4,7,8,2] y) <int64 n = {7}, int64 a = {1}> {
            y = DFT<inverse=1>(x, n, a) }""",
        splits="0.. -> 0, 2.. -> 2",
    ),
    "DFT, computed axis": RuleCase(
        "(float[4,6,8,2] x, int64 a) => (float[4,6,8,2] y) { y = DFT(x, , a) }", feeds={"a": np.int64(1)}
    ),
    "STFT": RuleCase(
        """(float[4,64,1] x, float[16] w) => (float[4,7,9,2] y) <int64 s = {8}, int64 n = {16}> {
            y = STFT(x, s, w, n) }""",
        splits="0... -> 0",
    ),
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
    # ONNX Runtime's integer reductions saturate, so that parts of them cannot be added.
    **{
        f"{op}, integers": RuleCase(
            f"(int32[4,6] x) => (int32[4,1] y) {{ y = {op}<axes=[1]>(x) }}",
            splits="0 -> 0",
            feeds={"x": np.full((4, 6), 2**30 + 1)},
            opset=12,
        )
        for op in ("ReduceSum", "ReduceSumSquare", "ReduceL1")
    },
    "ReduceSum, long integers": RuleCase(
        "(int64[4,6] x) => (int64[1,1] y) { y = ReduceSum(x) }", feeds={"x": np.full((4, 6), 2**60 + 1)}
    ),
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
    "CumProd": RuleCase(
        "(float[4,6] x) => (float[4,6] y) <int64 a = {0}> { y = CumProd<exclusive=1>(x, a) }",
        splits="1. -> 1",
        opset=26,
    ),
}
