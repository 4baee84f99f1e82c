"""The example of serving, and the documentation's error."""

import re
from pathlib import Path

import pytest

import onnxplace
import serving
from tests.conftest import FAST_PIPELINE
from tests.support.batch_models import make

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


@pytest.mark.slow
def test_the_example_answers_all_requests_in_three_ways(capsys):
    serving.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["batches of the requests of 8 threads", "a stream", "futures"]
    assert all("40 answers" in line for line in lines)


def test_the_documented_refusal_is_that_of_the_code(tmp_path):
    proto = make("(float[N, 4] x) => (float[N, 4] y) { [soft] y = Softmax<axis=0>(x) }")
    options = {"devices": "cpu:0", "shape": {"N": 2}, "pipeline": FAST_PIPELINE}
    bundle = onnxplace.compile(proto, tmp_path / "model.bundle", **options)
    with pytest.raises(onnxplace.UsageError) as caught:
        onnxplace.InferenceSession(bundle, batching=onnxplace.Batching())
    (documented,) = re.findall(r"```\n(error\[U083\].*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert documented.split() == str(caught.value).replace(str(tmp_path) + "/", "").split()
