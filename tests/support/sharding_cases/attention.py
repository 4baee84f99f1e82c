"""Cases of attention."""

import numpy as np

from tests.support.sharding_cases.rule_case import RuleCase, i32, i64

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
    "Attention, one head of keys with a past": RuleCase(
        """(float[2,4,3,6] q, float[2,1,3,6] k, float[2,1,3,6] v, float[2,1,3,7] m, float[2,1,4,6] a, float[2,1,4,6] b)
        => (float[2,4,3,6] y, float[2,1,7,6] c, float[2,1,7,6] d) { y, c, d = Attention(q, k, v, m, a, b) }""",
        splits="000000 -> 000, 1..... -> 1..",
        opset=23,
    ),
    "GroupQueryAttention, one head of keys": RuleCase(
        """(float[2,1,64] q, float[2,1,16] k, float[2,1,16] v, float[2,1,4,16] p, float[2,1,4,16] r, int32[2] n)
        => (float[2,1,64] y, float[2,1,5,16] a, float[2,1,5,16] b) <int32 t = {5}> {
            y, a, b = com.microsoft.GroupQueryAttention<num_heads=4,kv_num_heads=1>(q, k, v, p, r, n, t) }""",
        splits="000000. -> 000, 2...... -> 2..",
        feeds={"n": i32([4, 4])},
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
        """(float[2,1,32] q, float[2,1,16] k, float[2,1,16] v, float[2,2,4,8] p, float[2,2,4,8] r, int32[2] n)
        => (float[2,1,32] y, float[2,2,5,8] a, float[2,2,5,8] b) <int32 t = {5}> {
            y, a, b = com.microsoft.GroupQueryAttention<num_heads=4,kv_num_heads=2>(q, k, v, p, r, n, t) }""",
        splits="000000. -> 000, 22211.. -> 211",
        feeds={"n": i32([3, 4])},
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
