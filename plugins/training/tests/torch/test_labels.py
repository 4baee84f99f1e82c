"""Labels that torch refuses are refused before a step; those that its loss ignores are not."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; .ci/training has it")

from torch import nn

import onnxplace
from onnxplace.errors import FeedError
from onnxplace_training import Trainer, export_training_step

CASES = {
    "rows": (nn.CrossEntropyLoss(), (6,), {}),
    "negative labels that are ignored": (nn.CrossEntropyLoss(ignore_index=-1), (6,), {}),
    "weights and smoothing": (nn.CrossEntropyLoss(torch.tensor([1.0, 2, 3]), label_smoothing=0.1), (6,), {}),
    "pixels": (nn.CrossEntropyLoss(), (6, 4), {}),
    "micro-batches": (nn.CrossEntropyLoss(), (6,), {"gradient_accumulation": 2}),
    "fixed sizes": (nn.CrossEntropyLoss(reduction="sum"), (6,), {"dynamic_batch": False}),
    "in the loss": (lambda output, labels: -output.log_softmax(1).gather(1, labels[:, None]).mean(), (6,), {}),
}


@pytest.mark.parametrize("label", [-1, -100, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_label_is_refused_where_torch_refuses_it(name, label, tmp_path):
    loss, shape, options = CASES[name]
    module = nn.Linear(2, 3) if len(shape) == 1 else nn.Conv1d(2, 3, 1)
    x, labels = torch.randn(6, 2, *shape[1:]), torch.randint(3, shape)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step = export_training_step(module, loss, optimizer, (x, labels), **options)
    bundle = onnxplace.compile(
        step,
        tmp_path / "step.bundle",
        devices="cpu:0",
        shape={} if "dynamic_batch" in options else {"batch": 6},
        trial=False,
    )
    labels[4] = label
    names = [item.name for item in bundle.inputs][:2]
    feeds = dict(zip(names, (x.numpy(), labels.numpy())))
    with Trainer(bundle) as trainer:
        try:
            loss(module(x), labels)
        except (IndexError, RuntimeError):
            with pytest.raises(FeedError, match=f"has the label {label} in row 4"):
                trainer.step(feeds)
        else:
            trainer.step(feeds)
