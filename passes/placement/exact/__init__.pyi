from onnxplace.passes.placement.exact.solver import solve_exactly as solve_exactly
