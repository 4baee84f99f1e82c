"""Requests whose rows are picked by number: random indices, of which some mix requests."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from collections import Counter
from random import Random

import pytest
from onnx import ModelProto

from tests.support.batch_models import IDS, ROWS, STEP, draw_inputs, make
from tests.support.batches import check_joined_run, draw_requests, make_symbolic, prove
from tests.support.random_models import run_plain

EXAMPLES = int(os.environ.get("ONNXPLACE_EXAMPLES", "0"))
OPERATORS = (
    "Unsqueeze({one}, zero)",
    "Unsqueeze({one}, one)",
    "Unsqueeze({one}, last)",
    "Expand({one}, s)",
    "Transpose({one})",
    "Reshape({one}, last)",
    "Concat<axis=-1>({one}, {other})",
    "Concat<axis=-1>(upright, {one})",
    "Add({one}, {other})",
    "Mul({one}, {other})",
    "Max({one}, {other})",
    "Cast<to=6>({one})",
)
PICKS = ("Gather<axis=0>(x, {index})", "Gather<axis=1>(x, {index})", "GatherND(x, {index})")


def make_index_model(random: Random) -> ModelProto:
    """Return a model that picks by indices: row numbers, computed columns, and what operators make of both."""
    lines = [f"{ROWS} second = Constant<value_int=1>() t = Gather(s, second) c = Range(first, t, step)"]
    lines.append("largest = ArgMax<axis=1, keepdims=0>(ids) upright = Unsqueeze(r, last)")
    pool = ["r", "upright", "largest", "c"]
    for number in range(random.randint(0, 6)):
        operator = random.choice(OPERATORS).format(one=random.choice(pool[-3:]), other=random.choice(pool))
        lines.append(f"v{number} = {operator}")
        pool.append(f"v{number}")
    pick = random.choice(PICKS).format(index=random.choice(pool[-2:]))
    body = " ".join(lines)
    text = f"(float[N, 4] x, int64[N, 4] ids) => (float[N, 4] y) <{IDS}, {STEP}> {{ {body} y = {pick} }}"
    return make_symbolic(make(text), {})


@pytest.mark.slow
def test_picks_from_rows_are_proven_only_if_they_are_those_of_single_requests():
    counts: Counter[str] = Counter()
    for seed in range(EXAMPLES or 400):
        proto = make_index_model(Random(seed))
        feeds = draw_inputs(proto, {"N": 3})
        axes = prove(proto, {"N": 3})
        counts["proven" if axes.dimension else "refused"] += 1
        if not axes.dimension:
            assert axes.reason
            continue
        requests = draw_requests(proto, axes, feeds, Random(seed).choices((1, 2, 3), k=3), seed)
        try:
            run_plain(proto.SerializeToString(), requests)
        except Exception:  # noqa: BLE001 - indices may be too large; ONNX Runtime raises its own unrelated types
            continue
        counts["compared"] += 1
        check_joined_run(proto, axes, requests)
    assert min(counts[name] for name in ("proven", "refused", "compared")) > 10, counts
