"""Models in Hugging Face's cache: files are in `blobs`, and links to them in `snapshots/REVISION`."""

import shutil
from pathlib import Path


def make_snapshot(model: Path, hub: Path) -> tuple[Path, Path]:
    """Copy a model and its `weights.data` into a cache; return the link to the model, and the blob of its weights."""
    folder, blobs = hub / "snapshots" / "revision" / "onnx", hub / "blobs"
    for path in (folder, blobs):
        path.mkdir(parents=True)
    for number, name in enumerate((model.name, "weights.data")):
        blob = blobs / (f"{number}" * 40)
        shutil.copy(model.parent / name, blob)
        (folder / name).symlink_to(Path("../../../blobs") / blob.name)
    return folder / model.name, blob
