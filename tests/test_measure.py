"""Measuring: every node gets its kernel, times add up, and the child process for GPUs works from any script."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import models
from onnxplace.facts import Groups, Profile, Source
from onnxplace.machine import local_target
from onnxplace.model import load
from onnxplace.passes._measure import Job, in_child, measure, profile, stored
from onnxplace.passes._timing import Patience
from onnxplace.pipeline import Pipeline
from onnxplace.state import State


@pytest.fixture(scope="module")
def model():
    return load(models.build("squeezenet"))


def test_node_times_add_up_to_a_run_of_the_whole_model(model):
    found = measure(model, model.feeds(), "cpu:0", (0,), 3, 0.5)
    assert found.seconds.sum() == pytest.approx(found.whole_seconds)
    assert (found.seconds >= 0).all()


def test_what_onnxruntime_fuses_is_one_unit_and_stays_together(model):
    state = State(local_target("cpu:0,cpu:1")).having(model)
    state, _ = Pipeline.parse("optimize,profile{repeat=3,seconds=0.5},coplace{join=never}").run(state)
    profile, groups = state[Profile], state[Groups]
    graph = profile.graph
    fused = [(graph.ops[p], graph.ops[n]) for n in range(len(graph)) for p in graph.predecessors[n]
             if profile.unit[p] == profile.unit[n]]  # fmt: skip
    assert ("Conv", "Relu") in fused
    for node in range(len(graph)):
        same = np.flatnonzero(profile.unit == profile.unit[node])
        assert len(set(groups.group[same].tolist())) == 1
    assert set(profile.sources["cpu/1"].tolist()) <= {Source.MEASURED, Source.KNOWN}


def job_for(model, folder: Path) -> Job:
    source, entries = stored(model, folder)
    return Job(source, entries, "cpu:0", (0,), model.feeds(), Patience(3, 0.1, 0.02), str(folder), "model")


def test_the_child_process_measures_the_same_kernels(model, tmp_path):
    here, there = profile(job_for(model, tmp_path))[0], in_child(job_for(model, tmp_path))
    assert here.seconds.keys() == there.seconds.keys()
    assert here.output_bytes == there.output_bytes


def test_the_child_process_starts_from_a_script_without_a_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "import models\n"
        "from onnxplace.model import load\n"
        "from onnxplace.passes._measure import Job, in_child, stored\n"
        "from onnxplace.passes._timing import Patience\n"
        "model = load(models.build('squeezenet'))\n"
        "source, entries = stored(model, Path('.'))\n"
        "job = Job(source, entries, 'cpu:0', (0,), model.feeds(), Patience(3, 0.1, 0.02), '.', 'model')\n"
        "print(len(in_child(job).seconds))\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    ran = subprocess.run([sys.executable, script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
                         capture_output=True, text=True, check=True)  # fmt: skip
    assert int(ran.stdout) > 10
