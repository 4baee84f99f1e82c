"""Cases of operators that work on each element."""

from tests.support.sharding_cases.rule_case import RuleCase

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
        "(float[4,6] x) => (uint8[4,6] y, float s, uint8 z) { y, s, z = DynamicQuantizeLinear(x) }",
        splits="0 -> 0.., 1 -> 1..",
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
    "Not": RuleCase("(bool[4,6] x) => (bool[4,6] y) { y = Not(x) }", splits="0 -> 0, 1 -> 1"),
    "Gelu, Microsoft": RuleCase(
        "(float[4,6] x) => (float[4,6] y) { y = com.microsoft.Gelu(x) }", splits="0 -> 0, 1 -> 1"
    ),
    "QLinearWhere": RuleCase(
        """(bool[4,6] c, uint8[4,6] a, float sa, uint8 za, uint8[6] b, float sb, uint8 zb, float s, uint8 z)
        => (uint8[4,6] y) { y = com.microsoft.QLinearWhere(c, a, sa, za, b, sb, zb, s, z) }""",
        splits="00....... -> 0, 11..0.... -> 1",
    ),
    "QuantizeLinear, Microsoft": RuleCase(
        """(float[4,6] x, float[6] s, uint16[6] z) => (uint16[4,6] y) {
            y = com.microsoft.QuantizeLinear<axis=1>(x, s, z) }""",
        splits="0.. -> 0, 100 -> 1",
    ),
    "DequantizeLinear, Microsoft": RuleCase(
        "(int8[4,6] x, float s, int8 z) => (float[4,6] y) { y = com.microsoft.DequantizeLinear(x, s, z) }",
        splits="0.. -> 0, 1.. -> 1",
    ),
}
