"""Cases of recurrent layers."""

import numpy as np

from tests.support.sharding_cases.rule_case import RuleCase, i32

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
    "LSTM, two directions with all that these can have": RuleCase(
        """(float[3,4,5] x, float[2,24,5] w, float[2,24,6] r, float[2,48] b, int32[4] n, float[2,4,6] h, float[2,4,6] c,
            float[2,18] p) => (float[3,2,4,6] y, float[2,4,6] u, float[2,4,6] v) {
            y, u, v = LSTM<hidden_size=6,direction="bidirectional",clip=0.7,input_forget=1,
                activations=["Sigmoid","Tanh","Softsign","Softsign","Sigmoid","Tanh"]>(x, w, r, b, n, h, c, p) }""",
        splits=".000.000 -> 100, 1...011. -> 211",
        feeds={"n": i32([3, 1, 2, 3])},
    ),
    "GRU, two directions": RuleCase(
        """(float[3,4,5] x, float[2,18,5] w, float[2,18,6] r, float[2,36] b, int32[4] n, float[2,4,6] h)
        => (float[3,2,4,6] y, float[2,4,6] u) {
            y, u = GRU<hidden_size=6,direction="bidirectional",
                activations=["Sigmoid","Tanh","Tanh","Softsign"]>(x, w, r, b, n, h) }""",
        splits=".000.0 -> 10, 1...01 -> 21",
        feeds={"n": i32([3, 1, 2, 3])},
    ),
    "RNN, two directions": RuleCase(
        """(float[3,4,5] x, float[2,6,5] w, float[2,6,6] r, float[2,12] b, float[2,4,6] h) => (float[2,4,6] u) {
            , u = RNN<hidden_size=6,direction="bidirectional",activations=["Tanh","Softsign"]>(x, w, r, b, , h) }""",
        splits=".000-0 -> -0, 1...-1 -> -1",
    ),
    "RNN": RuleCase(
        """(float[3,4,5] x, float[1,6,5] w, float[1,6,6] r) => (float[1,4,6] u) {
            , u = RNN<hidden_size=6,direction="reverse">(x, w, r) }""",
        splits="1.. -> -1",
    ),
    "LSTM, one step": RuleCase(
        """(float[1,1,5] x, float[1,24,5] w, float[1,24,6] r, float[1,48] b, float[1,1,6] h, float[1,1,6] c,
            float[1,18] p) => (float[1,1,1,6] y, float[1,1,6] u, float[1,1,6] v) {
            y, u, v = LSTM<hidden_size=6,clip=0.7>(x, w, r, b, , h, c, p) }""",
        splits=".111-.21 -> 322",
    ),
    "LSTM, one step without a bias": RuleCase(
        """(float[1,1,5] x, float[1,24,5] w, float[1,24,6] r, float[1,1,6] h) => (float[1,1,6] u) {
            , u = LSTM<hidden_size=6>(x, w, r, , , h) }""",
        splits=".11--. -> -2",
    ),
    "GRU, one step": RuleCase(
        """(float[1,1,5] x, float[1,18,5] w, float[1,18,6] r, float[1,36] b, float[1,1,6] h)
        => (float[1,1,1,6] y, float[1,1,6] u) {
            y, u = GRU<hidden_size=6,linear_before_reset=1>(x, w, r, b, , h) }""",
        splits=".111-. -> 32",
    ),
    "GRU, one step, last state only": RuleCase(
        """(float[1,1,5] x, float[1,18,5] w, float[1,18,6] r, float[1,1,6] h) => (float[1,1,6] u) {
            , u = GRU<hidden_size=6,linear_before_reset=1>(x, w, r, , , h) }""",
        splits=".11--. -> -2",
    ),
    "GRU, one step, whose units become heads": RuleCase(
        """(float[1,1,5] x, float[1,12,5] w, float[1,12,4] r, float[1,1,4] h) => (float[1,2,2] y) {
            , u = GRU<hidden_size=4,linear_before_reset=1>(x, w, r, , , h) s = Constant<value_ints=[1,2,2]>()
            y = Reshape(u, s) }""",
        splits=".11--. -> -2",
    ),
    "GRU, one step, gate before the product": RuleCase(
        """(float[1,1,5] x, float[1,18,5] w, float[1,18,6] r, float[1,1,6] h) => (float[1,1,6] u) {
            , u = GRU<hidden_size=6>(x, w, r, , , h) }"""
    ),
    "RNN, one step without a state": RuleCase(
        """(float[1,1,5] x, float[1,6,5] w, float[1,6,6] r, float[1,12] b) => (float[1,1,6] u) {
            , u = RNN<hidden_size=6,direction="reverse">(x, w, r, b) }""",
        splits=".111 -> -2",
    ),
    "DynamicQuantizeLSTM": RuleCase(
        """(float[3,4,5] x, int8[2,5,24] w, int8[2,6,24] r, float[2,48] b, float[2,4,6] h, float[2,4,6] c, float[2] s,
            int8[2] z, float[2] t, int8[2] o) => (float[3,2,4,6] y, float[2,4,6] u, float[2,4,6] v) {
            y, u, v = com.microsoft.DynamicQuantizeLSTM<hidden_size=6,direction="bidirectional">
                (x, w, r, b, , h, c, , s, z, t, o) }""",
        splits=".000-00-0000 -> 100",
        feeds={"s": np.full(2, 0.01), "t": np.full(2, 0.01), "z": np.zeros(2), "o": np.zeros(2)},
    ),
}
