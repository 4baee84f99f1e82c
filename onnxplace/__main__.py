"""`python -m onnxplace`."""

from onnxplace.cli import entry

if __name__ == "__main__":
    entry()
