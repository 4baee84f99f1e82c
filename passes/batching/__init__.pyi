from onnxplace.passes.batching.batch_flow import find_batch_axes as find_batch_axes
