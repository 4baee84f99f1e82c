"""`python -m onnxplace`."""

from onnxplace.cli.app import entry

if __name__ == "__main__":
    entry()
