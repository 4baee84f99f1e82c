from onnxplace.passes.batching.batch_flow import BatchAxes as BatchAxes, find_batch_axes as find_batch_axes
