"""The scripts and manifests of examples/hosts: their syntax, and the commands in them."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from onnxplace.cli.app import cli
from onnxplace_hosts.connection import Connection
from tests.support.endless import endless_bundle

EXAMPLES = Path(__file__).parents[3] / "examples" / "hosts"
# The fields that the operator's types of v2beta1 have, as far as the manifest may use them.
SPEC_FIELDS = {
    "slotsPerWorker",
    "runPolicy",
    "mpiReplicaSpecs",
    "sshAuthMountPath",
    "launcherCreationPolicy",
    "mpiImplementation",
}
RUN_POLICY_FIELDS = {
    "cleanPodPolicy",
    "ttlSecondsAfterFinished",
    "activeDeadlineSeconds",
    "backoffLimit",
    "schedulingPolicy",
    "suspend",
}
CONTAINER_FIELDS = {"name", "image", "command", "args", "readinessProbe", "volumeMounts", "resources"}
SBATCH_OPTIONS = {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time", "output"}


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("answer_requests", EXAMPLES / "answer_requests.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_command(words, example):
    """Let the parser of a command, or of the example, read its arguments."""
    program, *arguments = words
    if program == "python":
        path, *options = arguments
        assert (EXAMPLES / Path(path).name).is_file()
        assert example.parse_arguments(options).bundle
        return "answer_requests"
    assert program == "onnxplace"
    name, *options = arguments
    with click.Context(cli) as context:
        _, command, _ = cli.resolve_command(context, [name])
        command.make_context(name, options, parent=context)
    return name


def test_the_manifest_has_only_fields_of_the_operator_and_commands_that_exist(example):
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((EXAMPLES / "mpijob.yaml").read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"], set(job)) == (
        "kubeflow.org/v2beta1",
        "MPIJob",
        {"apiVersion", "kind", "metadata", "spec"},
    )
    spec = job["spec"]
    assert set(spec) <= SPEC_FIELDS
    assert set(spec["runPolicy"]) <= RUN_POLICY_FIELDS
    assert spec["mpiImplementation"] in {"OpenMPI", "Intel", "MPICH"}
    assert spec["launcherCreationPolicy"] in {"AtStartup", "WaitForWorkersReady"}
    assert spec["runPolicy"]["cleanPodPolicy"] in {"All", "Running", "None"}
    replicas = spec["mpiReplicaSpecs"]
    assert {name: item["replicas"] for name, item in replicas.items()} == {"Launcher": 1, "Worker": 2}
    volumes = []
    for item in replicas.values():
        assert set(item) == {"replicas", "restartPolicy", "template"}
        assert item["restartPolicy"] in {"Never", "OnFailure"}
        (container,) = item["template"]["spec"]["containers"]
        assert set(container) <= CONTAINER_FIELDS
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in item["template"]["spec"]["volumes"]
        }
        volumes.append(container["volumeMounts"])
    assert volumes[0] == volumes[1]  # the bundle is at the same path
    (script,) = replicas["Launcher"]["template"]["spec"]["containers"][0]["args"]
    names = [check_command(shlex.split(line), example) for line in script.splitlines()]
    assert names == ["hosts", "compile", "verify", "answer_requests"]


def test_the_image_of_the_manifest_has_what_its_commands_need():
    lines = (EXAMPLES / "Dockerfile").read_text(encoding="utf-8")
    for path in re.findall(r"^COPY (\S+)", lines, re.MULTILINE):
        assert (EXAMPLES.parents[1] / path).is_file()
    assert "'onnxplace[cpu,mpi]'" in lines
    assert "/opt/onnxplace/answer_requests.py" in lines
    assert "/opt/onnxplace/answer_requests.py" in (EXAMPLES / "mpijob.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["slurm.sh", "srun_shell.sh"])
def test_the_scripts_have_the_syntax_of_their_shell(name):
    shell = (EXAMPLES / name).read_text(encoding="utf-8").splitlines()[0].removeprefix("#!")
    assert subprocess.run([shell, "-n", str(EXAMPLES / name)], capture_output=True, text=True).stderr == ""
    assert os.access(EXAMPLES / name, os.X_OK)


def write_program(folder, name, body):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o700)
    return path


def test_the_slurm_script_runs_commands_that_exist(tmp_path, example):
    text = (EXAMPLES / "slurm.sh").read_text(encoding="utf-8")
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.MULTILINE))
    assert set(options) == SBATCH_OPTIONS
    assert len(options) == text.count("\n#SBATCH")
    for program in ("onnxplace", "python"):
        write_program(tmp_path, program, f'printf "%s\\n" {program} "$@" "" >> "{tmp_path}/calls"')
    environment = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[01-02]",
        "REMOTE_SHELL": "rsh",
    }
    subprocess.run([str(EXAMPLES / "slurm.sh"), "the model.onnx"], env=environment, cwd=tmp_path, check=True)
    calls = [call.split("\n") for call in (tmp_path / "calls").read_text().strip("\n").split("\n\n")]
    assert [check_command(call, example) for call in calls] == [
        "hosts",
        "compile",
        "verify",
        "bench",
        "answer_requests",
    ]
    assert all(value in calls[0] for value in ("node[01-02]", "rsh"))
    assert all("the model.bundle" in call for call in calls[1:])


def test_the_remote_shell_of_slurm_passes_host_and_command_on(tmp_path, monkeypatch):
    write_program(tmp_path, "srun", f'printf "%s\\n" "$@" > "{tmp_path}/call"\nshift 4\nexec "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    connection = Connection(str(EXAMPLES / "srun_shell.sh"), timeout_seconds=60)
    (printed,) = connection.run_on_hosts(["node2"], "onnxplace_hosts.describe_host", "cpu:0")
    assert '"versions"' in printed
    assert (tmp_path / "call").read_text().splitlines()[:4] == [
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        "--nodelist=node2",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="MPICH is not installed here")
def test_the_example_answers_requests_with_two_copies(tmp_path, example, capsys):
    pytest.importorskip("mpi4py")
    bundle = endless_bundle(tmp_path)
    example.main([str(bundle.path), "--hosts", "localhost:4", "--replicas", "2", "--requests", "12"])
    *copies, total = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in copies] == ["copy on localhost: open"] * 2
    assert total.startswith("12 answers, ")
