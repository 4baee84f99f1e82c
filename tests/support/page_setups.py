"""What each page of the documentation leaves to its reader, so that its blocks run as they stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.page_files import ROOT, copy_file
from tests.support.tutorials import Surroundings, read_blocks, run_page

# Devices that are not here, commands that would replace a bundle of the same page, and packages that are here.
EVERYWHERE: Mapping[str, str] = {
    "cuda:": "cpu:",
    "onnxplace compile ": "onnxplace compile --force ",
    "pip install ": ": pip install ",
}
INPUTS = """
import numpy as np
import onnxplace
from onnxplace import *

x = np.ones((8, 64), np.float32)
images, bundle, write = x, "model.bundle", print
many = source = batch = [x] * 5
feeds = [{"x": x}] * 5
"""
TOKENS = """
import numpy as np

prompt, token, tokens = np.ones((1, 4), np.int64), np.ones((1, 1), np.int64), np.ones((8, 64), np.float32)
"""


@dataclass(frozen=True)
class Setup:
    """The files of a page, and its surroundings."""

    files: tuple[str, ...]
    surroundings: Surroundings


def setup(
    *files: str,
    replaced: Mapping[str, str] | None = None,
    prelude: str = "",
    before: str = "",
    after: str = "",
    together: bool = False,
    **environment: str,
) -> Setup:
    """Return the setup of a page; the arguments are those of `Surroundings`."""
    return Setup(files, Surroundings(environment, replaced or {}, prelude, before, after, together))


# Installs the command of docs/passes.md by hand, and calls it.
ADD_COMMAND = """
mkdir gain-1.0.dist-info
printf 'Metadata-Version: 2.1\\nName: gain\\nVersion: 1.0\\n' > gain-1.0.dist-info/METADATA
printf '[onnxplace.commands]\\ngain = gain:gain\\n' > gain-1.0.dist-info/entry_points.txt
onnxplace --help | grep 'gain  *Of the plugin from gain'
onnxplace gain graph.json
onnxplace gain graph.json --json --quiet
"""
# A decoder in a folder, as optimum writes it.
FOLDER = "mkdir my-llama && mv decoder.onnx my-llama/model.onnx"
SERVE = """
timeout 300 onnxplace serve model.bundle > server.log 2> /dev/null & echo $! > server.pid
until grep grpc server.log; do sleep 0.2; kill -0 $(cat server.pid); done
"""
SETUPS: Mapping[str, Setup] = {
    "README.md": setup(
        *("model.onnx", "decoder.onnx"),
        before=FOLDER,
        prelude=INPUTS,
        replaced={'{"images": images}': '{"x": x}', 'shape={"batch": 8})': 'shape={"batch": 8}, force=True)'},
    ),
    "docs/bundle.md": setup("decoder.onnx", prelude=TOKENS),
    "docs/conformance.md": setup("libops.so", "custom/model.onnx"),
    "docs/cost-graphs.md": setup(
        *("graph.graphml", "graph.json.gz", "mine.json"), replaced={"--budget 10": "--budget 1"}
    ),
    "docs/cost-model.md": setup("model.bundle", replaced={"--calibrate": "--calibrate --seconds 0.2"}),
    "docs/costs.md": setup(
        "conv/model.onnx",
        after="for kind in json csv; do onnxplace plan model.onnx --costs costs.$kind --devices cpu:0,cpu:1; done",
    ),
    "docs/doctor.md": setup(
        replaced={
            "onnxplace doctor  ": "onnxplace doctor --seconds 1 ",
            "cuda:0,cpu:0 ": "cpu:0,cpu:1 --seconds 1 ",
            "--seconds 30 --json": "--seconds 1 --json",
        }
    ),
    "docs/drop-in.md": setup("model.bundle", prelude=INPUTS),
    "docs/export.md": setup(
        *("fixed/model.onnx", "model.bundle", "feeds.npz", "device_map.json"),
        replaced={
            '"merged.onnx")': '"merged.onnx", force=True)',
            "cuda:0=8GiB": "cpu:0=8GiB",
            'np.load("inputs.npz")': 'np.load("feeds.npz")',
            "inputs.npz": "../feeds.npz",
            "cuda:0,cuda:1,cpu:0": "cpu:0,cpu:1,cpu:2",
            "cuda:0,cpu:0": "cpu:0,cpu:1",
        },
    ),
    "docs/faults.md": setup(
        "model.onnx", replaced={"benchmarks/": f"{ROOT}/benchmarks/", "--seconds 600": "--seconds 5"}
    ),
    "docs/hosts-first-steps.md": setup(
        *("fixed/model.onnx", "model.bundle"),
        prelude=TOKENS,
        replaced={'runtime="mpi", ': 'runtime="mpi", hosts="localhost:2", ', '"tokens"': '"x"'},
    ),
    "docs/hosts.md": setup(
        "model.bundle",
        prelude=INPUTS + TOKENS,
        replaced={"node1:1,node2:1": "localhost:2", "node[1-4]": "localhost:4", '"tokens"': '"x"'},
    ),
    "docs/index.md": setup("model.onnx", "feeds.npz", "examples"),
    "docs/inside.md": setup("examples", together=True),
    "docs/machines.md": setup("model.onnx", after="test -s l4.toml && test -d model.bundle"),
    "docs/models.md": setup(
        *("decoder.onnx", "examples"),
        before=FOLDER,
        prelude="import numpy as np\n",
    ),
    "docs/passes.md": setup(
        *("model.onnx", "graph.json"),
        PYTHONPATH=".",
        after="python -c 'import cheapest, onnxplace.testing as t; t.check_pass(cheapest.Cheapest)'\n" + ADD_COMMAND,
    ),
    "docs/reference/commands.md": setup("model.onnx"),
    "docs/report.md": setup(
        *("fixed/model.onnx", "model.bundle", "a.bundle", "b.bundle", "graph.json.gz"),
        before="onnxplace run model.bundle --trace t.json",
    ),
    "docs/serving.md": setup(
        "model.bundle",
        prelude=INPUTS + "session = InferenceSession(bundle)\n",
        # In the background, until all blocks have run, or for a few minutes after one that failed.
        replaced={"onnxplace serve model.bundle\n": SERVE},
        after="kill $(cat server.pid)",
    ),
    "docs/sharding.md": setup(
        *("bert.onnx", "cluster.toml"),
        replaced={"--shard-metadata": "--shard-metadata --objective fit"},  # so small a model gains nothing
        after="onnxplace plan bert.onnx --target h200.toml --shape batch=8",
    ),
    "docs/sizes.md": setup(
        *("sequences/model.onnx", "decoder.onnx"),
        replaced={"model.bundle/plan1": "model.bundle"},  # of so small a model one plan is enough
        after="test -s plan1.html && test -d decoder.bundle",
    ),
    "docs/streaming.md": setup("model.onnx", after="test -s report.html"),
    "docs/target.md": setup(
        "model.onnx",
        replaced={"cuda:": "cuda:"},
        after="for name in gpu hosts eight shared; do\n"
        "onnxplace plan model.onnx --target $name.toml --shape batch=8; done",
    ),
    "docs/terminal.md": setup(HOME=".", after="ls .zfunc/_onnxplace"),
    "docs/throughput.md": setup("fixed/model.onnx", prelude=INPUTS),
    "docs/traces.md": setup(
        "model.bundle", prelude=INPUTS + "import json\nfrom pathlib import Path\n", after="ls trace.json"
    ),
    "examples/README.md": setup("examples"),
    "examples/plugin/README.md": setup(
        *("examples", "fixed/model.onnx"),
        before="printf 'a b 5\\na c 5\\n' > graph.edges",
        replaced={"pip install ./": "pip install -q --no-deps --no-build-isolation --target plugins ./"},
        PYTHONPATH="plugins",
    ),
}


def run_with_setup(name: str, needed: Setup, store: Path, folder: Path, runner: str = "") -> None:
    """Run the blocks of a page in a folder, with all that they need; raises AssertionError if one fails or none runs.

    `name` is relative to the repository, `runner` as for `read_blocks`; `store` keeps files for other pages.
    """
    page = ROOT / name
    for file in needed.files:
        copy_file(file, store, folder)
    blocks = read_blocks(page.read_text(encoding="utf-8"), runner)
    texts = "".join(block.text for block in blocks)
    own = needed.surroundings.replaced
    common = {old: new for old, new in EVERYWHERE.items() if old in texts and not any(old in text for text in own)}
    ran = run_page(page, folder, replace(needed.surroundings, replaced={**own, **common}), runner=runner)
    assert ran == len(blocks) > 0
