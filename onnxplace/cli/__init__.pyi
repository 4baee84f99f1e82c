from onnxplace.cli.app import entry as entry, main as main
