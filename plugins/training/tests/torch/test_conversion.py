"""Programs of torch.export and modules are compiled as their ONNX form, and torch's refusals are quoted."""

import numpy as np
import pytest

import onnxplace
from onnxplace.errors import ModelError, UsageError

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
from torch import nn

ESTIMATE = "profile{estimate=true},coplace,m-etf,split,emit"
OPTIONS = {"devices": "cpu:0,cpu:1", "trial": False, "pipeline": ESTIMATE}


class Towers(nn.Module):
    """Two branches; dropout must not run."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.dropout = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x, y):
        return self.dropout(torch.relu(self.left(x))) + torch.tanh(self.right(y))


class Decoder(nn.Module):
    """A decoder that takes and returns keys and values of past tokens as a list of pairs."""

    def __init__(self, layers=2, hidden=32, heads=2, vocab=64):
        super().__init__()
        self.heads, self.embed, self.head = heads, nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab)
        self.layers = nn.ModuleList(nn.Linear(hidden, 3 * hidden) for _ in range(layers))

    def forward(self, input_ids, past_key_values):
        value, present = self.embed(input_ids), []
        for layer, (keys, values) in zip(self.layers, past_key_values):
            batch, length, _ = value.shape
            parts = [part.reshape(batch, length, self.heads, -1).transpose(1, 2) for part in layer(value).chunk(3, -1)]
            keys, values = torch.cat([keys, parts[1]], 2), torch.cat([values, parts[2]], 2)
            mask = torch.arange(keys.shape[2])[None] <= torch.arange(length)[:, None] + keys.shape[2] - length
            mixed = nn.functional.scaled_dot_product_attention(parts[0], keys, values, attn_mask=mask)
            value = value + mixed.transpose(1, 2).reshape(batch, length, -1)
            present.append((keys, values))
        return self.head(value), present


def trace_towers():
    arguments = (torch.randn(3, 8), torch.randn(3, 8))
    batch = torch.export.Dim("batch", min=1, max=64)
    return torch.export.export(Towers().eval(), arguments, dynamic_shapes=({0: batch}, {0: batch}))


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A program with a dynamic batch, and its file."""
    traced = trace_towers()
    path = tmp_path_factory.mktemp("program") / "towers.pt2"
    torch.export.save(traced, path)
    return traced, path


def test_a_program_in_a_file_compiles_with_the_sizes_of_its_examples(run_cli, program, tmp_path):
    traced, path = program
    options = ("-o", tmp_path / "out", "--devices", "cpu:0,cpu:1", "--no-trial", "--pipeline", ESTIMATE)
    result = run_cli("compile", path, *options, "-v")
    assert result.code == 0, result.err
    bundle = onnxplace.load(tmp_path / "out")
    assert bundle.manifest.model == "towers"
    ((symbol, size),) = bundle.manifest.dimensions.items()
    assert size == 3
    assert f"note[M003] sizes of its example inputs hold: {symbol}=3\n  hint: --shape gives others" in result.err
    feeds = {name: np.random.default_rng(0).standard_normal((5, 8), np.float32) for name in ("x", "y")}
    with onnxplace.InferenceSession(bundle) as session:
        (output,) = session.run(None, feeds)
    expected = traced.module()(*map(torch.from_numpy, feeds.values())).detach().numpy()
    np.testing.assert_allclose(output, expected, atol=1e-6)
    result = run_cli("compile", path, *options, "--force", "--shape", f"{symbol}=7")
    assert "M003" not in result.err
    assert onnxplace.load(tmp_path / "out").manifest.dimensions == {symbol: 7}


def test_the_bundle_is_named_after_the_program_and_nothing_else_is_left(program, tmp_path, monkeypatch):
    (tmp_path / "towers.pt2").write_bytes(program[1].read_bytes())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    onnxplace.compile(tmp_path / "towers.pt2", **OPTIONS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["towers.bundle", "towers.pt2"]


def test_a_program_is_planned(run_cli, program):
    result = run_cli("plan", program[1], "--devices", "cpu:0", "--estimate")
    assert result.code == 0, result.err
    assert "towers: costs are estimates" in result.out


@pytest.mark.parametrize("by_name", [False, True])
def test_a_module_compiles_with_example_inputs_as_in_inference_and_keeps_its_mode(tmp_path, by_name):
    module, arguments = Towers(), (torch.randn(4, 8), torch.randn(4, 8))
    module.left.eval()
    example = dict(zip("xy", arguments)) if by_name else arguments
    bundle = onnxplace.compile(module, tmp_path / "out", example_inputs=example, **OPTIONS)
    assert [part.training for part in (module, module.left, module.right)] == [True, False, True]
    with onnxplace.InferenceSession(bundle) as session:
        (output,) = session.run(None, {name: value.numpy() for name, value in zip("xy", arguments)})
    np.testing.assert_allclose(output, module.eval()(*arguments).detach().numpy(), atol=1e-6)


def test_a_program_object_compiles_too(program, tmp_path):
    assert onnxplace.compile(program[0], tmp_path / "out", **OPTIONS).manifest.model == "ExportedProgram"


def test_a_module_needs_example_inputs_and_a_tensor_is_no_model(tmp_path):
    with pytest.raises(UsageError, match="expected example_inputs") as caught:
        onnxplace.compile(Towers(), tmp_path / "out")
    assert (caught.value.where, caught.value.hint[:20]) == ("Towers", "give its arguments: ")
    with pytest.raises(UsageError, match="expected a model, got another object of torch"):
        onnxplace.compile(torch.zeros(3), tmp_path / "out")


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Eigenvalues(nn.Module):
    def forward(self, x):
        return torch.linalg.eigvals(x).real


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Branching, "torch.export cannot trace it: "),
        (Eigenvalues, "torch.onnx cannot convert it: No ONNX function found"),
    ],
)
def test_what_torch_refuses_is_quoted(tmp_path, module, message):
    with pytest.raises(ModelError) as caught:
        onnxplace.compile(module(), tmp_path / "out", example_inputs=(torch.eye(3),))
    assert (caught.value.code, caught.value.where) == ("M004", module.__name__)
    assert caught.value.message.startswith(message)
    assert "\n" not in caught.value.message
    assert not list(tmp_path.iterdir())


class Remembering(nn.Module):
    """What a call may change; its `forward` comes from a test."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(2))
        self.plain, self.parts, self.seen = torch.zeros(2), [torch.zeros(2)], None
        self.norm = nn.BatchNorm1d(2)


def remember(forward):
    return type("Remembering", (Remembering,), {"forward": forward})()


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args) * 2


def count(self, x):
    self.total += 1
    return x * self.total


def count_under_a_condition(self, x):
    self.total.copy_(torch.where(x.sum() > 0, self.total + 1, self.total))
    return x * self.total


def read_before_writing(self, x):
    value = self.total + x
    self.total = x * 2
    return value


def write_a_part(self, x):
    self.total[0] = x[0] + self.total[1]
    return self.total.sum()


def count_in_an_attribute(self, x):
    self.plain = self.plain + 1
    return x * self.plain


def count_in_a_list(self, x):
    self.parts[0] = self.parts[0] + 1
    return x * self.parts[0]


def write_into_a_cache(self, x, cache):
    cache.add_(x)
    return cache.sum()


CHANGES = {
    count: "total",
    count_under_a_condition: "total",
    read_before_writing: "total",
    write_a_part: "total",
    count_in_an_attribute: "plain",
    count_in_a_list: "parts[0]",
    write_into_a_cache: "cache",
}


@pytest.mark.parametrize("forward", CHANGES)
@pytest.mark.parametrize("is_nested", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_a_call_changes_for_the_next_one_is_refused_by_name(tmp_path, forward, is_nested):
    module, name = remember(forward), CHANGES[forward]
    arguments = tuple(torch.ones(2) for _ in range(2 if name == "cache" else 1))
    if is_nested:
        module, name = Outer(module), {"cache": "args_1"}.get(name, f"inner.{name}")
    with pytest.raises(ModelError, match="for the next one: an ONNX model keeps nothing") as caught:
        onnxplace.compile(module, tmp_path / "out", example_inputs=arguments)
    assert (caught.value.code, repr(name) in caught.value.message) == ("M004", True)
    assert "--state OUTPUT=INPUT" in caught.value.hint
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("forward", [count, read_before_writing])
def test_a_program_in_a_file_that_changes_a_buffer_is_refused(run_cli, tmp_path, forward):
    torch.export.save(torch.export.export(remember(forward).eval(), (torch.ones(2),)), tmp_path / "m.pt2")
    result = run_cli("compile", tmp_path / "m.pt2")
    assert result.code == 2
    assert f"error[M004] {tmp_path / 'm.pt2'}: a call changes 'total' for the next one" in result.err
    assert "--state OUTPUT=INPUT" in result.err


def test_a_program_that_was_traced_in_training_is_refused(tmp_path):
    program = torch.export.export(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), (torch.randn(4, 2),))
    with pytest.raises(ModelError, match=r"changes '1.running_mean', '1.running_var' for the next") as caught:
        onnxplace.compile(program, tmp_path / "out")
    assert "module.eval()" in caught.value.hint


def count_calls(self, x):
    self.total += 1
    return x * 2


def replace(self, x):
    self.total.copy_(x * 2)
    return self.total + 1


def keep_a_result(self, x):
    self.seen, self.plain = x * 2, x + 1
    return self.seen * torch.tensor([1.0, 2.0])


def normalise(self, x):
    return torch.relu_(self.norm(x[None])).sub_(1)


def prepare_in_place(self, x):
    return x.mul_(2).sub_(1) * x


def return_the_cache(self, x, cache):
    cache.add_(x)
    return cache


@pytest.mark.parametrize(
    "forward", [count_calls, replace, keep_a_result, normalise, prepare_in_place, return_the_cache]
)
def test_what_no_later_call_reads_may_change(tmp_path, forward):
    module, arguments = remember(forward), [torch.ones(2), torch.full((2,), 3.0)][: forward.__code__.co_argcount - 1]
    bundle = onnxplace.compile(module, tmp_path / "out", example_inputs=[x.clone() for x in arguments], **OPTIONS)
    feeds = dict(zip((item.name for item in bundle.inputs), (x.numpy() for x in arguments)))
    with onnxplace.InferenceSession(bundle) as session:
        for _ in range(3):
            expected = module.eval()(*(x.clone() for x in arguments)).detach().numpy()
            np.testing.assert_allclose(session.run(None, feeds)[0], expected, atol=1e-6)


@pytest.mark.parametrize("keep", [0, 7, 3000])
def test_a_damaged_program_is_refused(run_cli, program, tmp_path, keep):
    (tmp_path / "bad.pt2").write_bytes(program[1].read_bytes()[:keep])
    result = run_cli("compile", tmp_path / "bad.pt2")
    assert result.code == 2
    assert f"error[M004] {tmp_path / 'bad.pt2'}: torch cannot read it as a program of torch.export: " in result.err
    assert "torch.export.save" in result.err


@pytest.mark.slow
def test_a_decoder_in_a_program_compiles_with_llm_alone(run_cli, tmp_path):
    module, free = Decoder().eval(), torch.export.Dim.DYNAMIC
    past = [(torch.zeros(2, 2, 5, 16), torch.zeros(2, 2, 5, 16)) for _ in module.layers]
    axes = ({0: free, 1: free}, [({0: free, 2: free}, {0: free, 2: free}) for _ in module.layers])
    traced = torch.export.export(module, (torch.zeros(2, 3, dtype=torch.long), past), dynamic_shapes=axes)
    torch.export.save(traced, tmp_path / "decoder.pt2")
    result = run_cli("compile", tmp_path / "decoder.pt2", "--llm", "--devices", "cpu:0,cpu:1", "--pipeline", ESTIMATE)
    assert result.code == 0, result.err
    assert "new tokens in 'input_ids', sizes batch=1, sequence=1, past=128" in result.err
    bundle = onnxplace.load(tmp_path / "decoder.bundle")
    assert [state.input for state in bundle.manifest.states] == [
        f"past_key_values_{i}_{j}" for i in (0, 1) for j in (0, 1)
    ]
    with onnxplace.InferenceSession(bundle) as session:
        tokens = torch.tensor([[5, 9, 2, 33]])
        (first,) = session.run(None, {"input_ids": tokens[:, :3].numpy(), **bundle.zero_states(batch=1, past=0)})
        (second,) = session.run(None, {"input_ids": tokens[:, 3:].numpy()})
    expected = module(tokens, [(pair[0][:1, :, :0], pair[1][:1, :, :0]) for pair in past])[0].detach().numpy()
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_decoder_of_transformers_exported_by_its_own_exporter_compiles_with_llm_alone(run_cli, tmp_path, monkeypatch):
    """Its folder, as `save_pretrained` writes it; the bundle continues as transformers itself does."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    exporter = pytest.importorskip("transformers.exporters.exporter_onnx")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, max_position_embeddings=256, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    cache = transformers.DynamicCache([(torch.randn(2, 2, 6, 16), torch.randn(2, 2, 6, 16)) for _ in range(2)])
    feeds = {"input_ids": torch.zeros(2, 2, dtype=torch.long), "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    exported = exporter.OnnxExporter().export(
        model, {**feeds, "cache": cache}, config=exporter.OnnxConfig(dynamic=True)
    )
    exported.save_pretrained(tmp_path / "llama")
    result = run_cli("compile", tmp_path / "llama", "--llm", "--devices", "cpu:0,cpu:1", "--pipeline", ESTIMATE)
    assert result.code == 0, result.err
    assert "4 states (output.cache.layers.0.keys=input.cache.layers.0.keys, ...)" in result.err
    from generate import generate, make_chooser

    bundle = onnxplace.load(tmp_path / "llama" / "model.bundle")
    prompt = [7, 42, 99]
    with onnxplace.InferenceSession(bundle) as session:
        tokens = generate(bundle, session, prompt, make_chooser(0, 1, None))
        generated = [next(tokens) for _ in range(8)]
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, 3, dtype=torch.long), **options)
    assert generated == expected[0, 3:].tolist()
