"""Wheel, sdist, editable install, and a clone without symbolic links all hold every module, and import it."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.architecture.test_rooms import MODULES

ROOT = Path(__file__).parents[2]
# Those of `plugins/` that are parts of this distribution.
PARTS = [path for path in (ROOT / "plugins").glob("*/onnxplace_*") if not (path.parent / "pyproject.toml").exists()]
FILES = {f"onnxplace/{name.replace('.', '/')}.py" for name in MODULES}
FILES |= {
    path.relative_to(part.parent).as_posix() for part in PARTS for path in part.rglob("*.py") if path.stem != "__init__"
}
PACKAGES = {f"{folder}/__init__.py" for name in FILES for folder in Path(name).parents if folder.name}
# Imports each module from a folder, and says where the package came from.
IMPORT_ALL = """
import site, sys
sys.path.insert(0, sys.argv[1])
site.addsitedir(sys.argv[1])
from importlib import import_module
for name in sys.argv[3:]:
    assert import_module(name).__file__.startswith(sys.argv[2]), (name, import_module(name).__file__)
"""

pytestmark = pytest.mark.slow


def build(source: Path, hook: str) -> Path:
    """Call a hook of the build backend in a source tree; returns what it built, in a folder of its own."""
    folder = source.parent / f"{source.name}-{hook}"
    folder.mkdir()
    script = f"import sys; from setuptools import build_meta; build_meta.{hook}(sys.argv[1])"
    # -P: no module of the source tree is imported by the name of one of the backend's.
    done = subprocess.run([sys.executable, "-P", "-c", script, str(folder)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = folder.iterdir()
    return file


def unpacked(archive: Path) -> Path:
    """Unpack an archive next to itself; returns the folder with what was in it."""
    folder = archive.parent / "unpacked"
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as file:
            file.extractall(folder)
        return folder
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    (inner,) = folder.iterdir()
    return inner


def python_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*.py")}


def import_all(site: Path, origin: Path) -> None:
    """Import every module in a fresh interpreter that looks into `site` first; all must come from `origin`."""
    names = [file.removesuffix(".py").replace("/", ".") for file in sorted(FILES | PACKAGES)]
    names = [name.removesuffix(".__init__") for name in names if name != "onnxplace.__main__"]
    if find_spec("torch") is None:  # the extra `[torch]`; without it, only the package itself can be imported
        names = [name for name in names if not name.startswith("onnxplace_training.torch.")]
    command = [sys.executable, "-P", "-S", "-c", SITE + IMPORT_ALL, str(site), str(origin), *names]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=site, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# The dependencies, without the .pth file by which this checkout itself may be installed.
SITE = f"import sys; sys.path += {[path for path in sys.path if path.endswith('site-packages')]!r}\n"


def clone(folder: Path, *options: str) -> Path:
    """Clone the commit and add what is not committed yet, so that the test is about the files that are there."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    subprocess.run(["git", "clone", "-q", *options, str(ROOT), str(folder)], check=True, capture_output=True)
    changes = ["git", "-C", str(ROOT), "ls-files", "-z", "--modified", "--others", "--exclude-standard"]
    for name in filter(None, subprocess.run(changes, capture_output=True, text=True, check=True).stdout.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, target)
        else:
            target.unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return clone(tmp_path_factory.mktemp("packaging") / "source")


def test_the_wheel_holds_every_module_and_imports_it(source):
    folder = unpacked(build(source, "build_wheel"))
    assert python_files(folder) == FILES | PACKAGES
    assert (folder / "onnxplace" / "py.typed").exists()
    page = {path.name for path in (ROOT / "onnxplace" / "reports" / "page").iterdir()}
    assert {path.name for path in (folder / "onnxplace" / "reports" / "page").iterdir()} == page
    for top, data in (
        (ROOT, "onnxplace/target/catalogue.toml"),
        *((part.parent, f"{part.name}/py.typed") for part in PARTS),
    ):
        assert (folder / data).read_bytes() == (top / data).read_bytes()
    for part, data in (
        ("formats", "onnxplace_formats/triton_model.txt"),
        ("serving", "onnxplace_serving/inference.textproto"),
    ):
        assert (folder / data).read_bytes() == (ROOT / "plugins" / part / data).read_bytes()
    assert (folder / "onnxplace" / "docs" / "errors.md").read_bytes() == (ROOT / "docs" / "errors.md").read_bytes()
    assert [path.name for path in (folder / "onnxplace" / "docs").iterdir()] == ["errors.md"]
    import_all(folder, folder)


def test_a_wheel_built_from_the_sdist_holds_the_same(source):
    sdist = unpacked(build(source, "build_sdist"))
    folder = unpacked(build(sdist, "build_wheel"))
    assert python_files(folder) == FILES | PACKAGES
    assert (folder / "onnxplace" / "docs" / "errors.md").exists()


def test_an_editable_install_imports_every_module(source):
    import_all(unpacked(build(source, "build_editable")), source)


def test_a_clone_without_symbolic_links_builds_the_same_wheel_and_imports_every_module(tmp_path):
    """As on Windows without developer mode, where git writes a link as a file with its target as text."""
    plain = clone(tmp_path / "plain", "-c", "core.symlinks=false")
    assert (plain / "onnxplace" / "passes").is_file()
    assert python_files(unpacked(build(plain, "build_wheel"))) == FILES | PACKAGES
    import_all(unpacked(build(plain, "build_editable")), plain)
