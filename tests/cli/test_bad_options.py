"""Options with unknown names and wrong texts are refused with a hint."""

import pytest

from tests.support.bad_input import SHAPE

pytestmark = pytest.mark.usefixtures("no_gpus")


@pytest.mark.parametrize(
    ("options", "expected_words"),
    [
        (("--devices", "cpus:0"), ("--devices", "'cpus:0'", "did you mean 'cpu:0'?")),
        (("--devices", "cpu:"), ("'cpu:'", "index", "cpu:0")),
        (("--devices", "cpu:zero"), ("'cpu:zero'", "cpu:0")),
        (("--devices", ","), ("empty", "cpu:0")),
        (("--devices", "cpu:0,cpu:1,cpu:0"), ("twice", "cpu:0")),
        (("--placer", "m-eft"), ("'m-eft'", "did you mean 'm-etf'?", "onnxplace passes")),
        (("--placer", "M_ETF"), ("unknown placer", "did you mean 'm-etf'?")),
        (("--placer", "optimise"), ("unknown placer", "known: single, m-topo")),
        (("--placer", "fuse"), ("'fuse'", "not a placer", "m-etf")),
        (("--placer", "refine"), ("not a placer", "starts from a placement", "m-etf,refine", "--placer auto")),
        (("--placer", "m-etf,refine"), ("not a placer but a pipeline", "--pipeline")),
        (("--devices", "cudda:1"), ("'cudda:1'", "did you mean 'cuda:1'?")),
        (("--max-memory", "cpu:0=1GiB,cpu:0=2GiB"), ("--max-memory", "cpu:0", "twice")),
        (("--max-memory", "gpu:0=1GiB"), ("'gpu:0'", "known: cpu:0, cpu:1")),
        (("--shape", "batch=1,batch=2"), ("--shape", "'batch'", "twice")),
        (("--pipeline", "optimise,profile"), ("'optimise'", "did you mean 'optimize'?", "onnxplace passes")),
        (("--pipeline", "profile{repeats=3}"), ("'profile'", "'repeats'", "did you mean 'repeat'?")),
        (("--pipeline", "fuse{repeat=3}"), ("'fuse'", "'repeat'")),
        (("--pipeline", "profile{repeat=three}"), ("'profile'", "'repeat'", "'three'", "integer")),
        (("--pipeline", "coplace{join=often}"), ("'join'", "'often'", "'always'")),
        (("--pipeline", "profile{repeat=3"), ("character 17", "the end")),
        (("--pipeline", "profile,,emit"), ("character 9", "','")),
        (("--pipeline", ""), ("character 1", "the end")),
        (("--pipeline", "optimize,split,emit"), ("'split'", "Profile", "put profile before it")),
        (("--pipeline", "profile{estimate=true}"), ("writes no bundle", "split,emit")),
        (("--pipeline", "profile", "--placer", "single"), ("--placer", "--pipeline")),
        (("--pipeline", "profile", "--colocate", "x"), ("--pipeline", "--colocate")),
        (("--target", "t.toml", "--devices", "cpu:0"), ("--devices", "--target")),
        (("--max-memory", "lots"), ("'lots'", "16GiB")),
        (("--max-memory", "cpu:7=1GiB"), ("'cpu:7'", "--max-memory", "did you mean 'cpu:1'?")),
        (("--colocate", "nothing.*"), ("--colocate", "nothing.*", "'left'")),
        (("--colocate", "("), ("--colocate", "regular expression")),
    ],
    ids=" ".join,
)
def test_an_option_with_an_unknown_name_is_refused_with_similar_names(refused, model_file, options, expected_words):
    (model_file.parent / "t.toml").write_text('[[devices]]\nid = "cpu:0"\nmemory_bytes = 1000000\n')
    refused(2, expected_words, "compile", model_file, *SHAPE, *options)


def test_a_bad_escape_in_a_pipeline_is_pointed_at(refused, model_file):
    refused(2, ("character",), "compile", model_file, *SHAPE, "--pipeline", r'profile{costs="\x"}')


def test_an_option_given_twice_is_refused(refused, model_file):
    pipeline = "profile{repeat=3,repeat=4},m-etf,split,emit"
    refused(2, ("'repeat'", "twice"), "compile", model_file, *SHAPE, "--pipeline", pipeline)


def test_measuring_zero_runs_is_refused(refused, model_file):
    pipeline = "optimize,profile{repeat=0},m-etf,split,emit"
    refused(2, ("'repeat'", "'0'"), "compile", model_file, *SHAPE, "--pipeline", pipeline)


def test_one_device_under_two_spellings_is_a_duplicate(refused, model_file):
    refused(2, ("twice",), "compile", model_file, *SHAPE, "--devices", "cpu:0,cpu:00")


@pytest.mark.parametrize("command", ["compile", "run"])
def test_a_negative_seed_is_refused(refused, model_file, bundle_copy, command):
    refused(
        2, ("seed", "-1"), command, *((model_file, *SHAPE) if command == "compile" else (bundle_copy,)), "--seed", "-1"
    )


def test_an_unknown_runtime_gets_the_nearest_one(refused, bundle_copy):
    expected_words = ("'onnxrutime'", "did you mean 'onnxruntime'?", "onnxplace runtimes")
    refused(2, expected_words, "run", bundle_copy, "--runtime", "onnxrutime")


@pytest.mark.parametrize(
    ("command", "name", "near"), [("passes", "m-eft", "m-etf"), ("runtimes", "simulate", "simulated")]
)
def test_asking_about_an_unknown_name_gets_the_nearest_one(refused, command, name, near):
    refused(2, (f"'{name}'", f"did you mean '{near}'?"), command, name)


@pytest.mark.parametrize(
    ("arguments", "expected_words"),
    [
        (("compil",), "compile"),
        (("compile", "m.onnx", "--devces", "cpu:0"), "--devices"),
        (("run", "bundle", "--repeat", "0"), "--repeat"),
        (("run", "bundle", "--seed", "x"), "--seed"),
        (("compile",), "MODEL"),
    ],
)
def test_bad_usage_exits_with_two_and_names_the_option(run_cli, arguments, expected_words):
    result = run_cli(*arguments)
    assert (result.code, result.out) == (2, "")
    assert expected_words in result.err


@pytest.mark.usefixtures("unusable_gpu")
def test_an_unusable_gpu_is_refused_with_a_fix(refused, model_file):
    refused(2, ("cuda:0", "pip install 'onnxplace[gpu]'"), "compile", model_file, *SHAPE, "--devices", "cuda:0")


@pytest.mark.usefixtures("unusable_gpu")
@pytest.mark.parametrize("command", ["run", "verify", "bench"])
def test_a_bundle_for_an_unusable_gpu_is_refused_with_a_fix(refused, bundle_copy, command):
    manifest = bundle_copy / "manifest.json"
    manifest.write_text(manifest.read_text().replace("cpu:1", "cuda:0"))
    refused(2, ("cuda:0", "pip install 'onnxplace[gpu]'"), command, bundle_copy)
