"""What fuzz tests share: how many examples, documents near a good one, and what may come of them."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, settings, strategies as st

from onnxplace.errors import MAX_CHARACTERS, OnnxplaceError

EXAMPLES = int(os.environ.get("ONNXPLACE_EXAMPLES", "0"))
"""How many to try; unless it is set, always the same ones."""
fuzzed = settings(
    max_examples=EXAMPLES or 100,
    derandomize=not EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


def read_or_refused(read: Callable[[], object]) -> Any:
    """Return what is read; None if that is refused as bad input or infeasible, in a text that fits on a screen."""
    try:
        return read()
    except OnnxplaceError as problem:
        refused = problem
    assert refused.exit_code in (2, 3), refused
    assert len(str(refused)) < 4 * MAX_CHARACTERS
    return None


# ---------------------------------------------------------------------------------------------- what is odd

NUMBERS = st.sampled_from(
    [0, -1, 1, 2**31, 2**63, 2**64, 10**18, 10**400, 1e-320, 1e308, float("inf"), float("nan"), 0.5]
)
ODD = st.one_of(
    NUMBERS, st.none(), st.booleans(), st.text(max_size=8),
    st.sampled_from(["", "cpu:0", "(a+)+b", "*", "\0", "\ud800", "1" * 5000]),
    st.sampled_from([[], {}, [[]], [{}], {"a": {}}, {"id": 0}, [0], ["cpu:0", "cpu:0"]]),
)  # fmt: skip
JUNK = st.one_of(
    st.binary(max_size=40), st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"\0" * 100, b"1" * 5000])
)


def places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container in a document with each of its keys."""
    keys = document.keys() if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    for key in list(keys):
        yield document, key
        yield from places(document[key])


@st.composite
def mutated(draw: st.DrawFn, document: Any) -> Any:
    """Return a document in which some things are odd, gone, or there twice."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        known = list(places(document))
        if not known:
            break
        holder, key = known[draw(st.integers(0, len(known) - 1))]
        change = draw(st.sampled_from(["odd", "odd", "odd", "gone", "twice", "renamed"]))
        if change == "odd":
            holder[key] = copy.deepcopy(draw(ODD))
        elif change == "gone":
            del holder[key]
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        else:
            holder[draw(st.text(max_size=5))] = copy.deepcopy(holder[key])
    return document


@st.composite
def spliced(draw: st.DrawFn, data: bytes) -> bytes:
    """Return bytes of which some are gone, replaced or there twice."""
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(data)))
        end = min(begin + draw(st.integers(0, 12)), len(data))
        data = data[:begin] + draw(st.one_of(JUNK, st.just(data[begin:end] * 2), st.just(b""))) + data[end:]
    return data


def texts_of(document: Any) -> st.SearchStrategy[bytes]:
    """Return JSON texts near a document."""
    text = json.dumps(document)
    return st.one_of(mutated(document).map(lambda value: json.dumps(value).encode()), spliced(text.encode()), JUNK)
