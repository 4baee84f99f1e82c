from onnxplace.passes.placement.exact.exact_solver import solve_exactly as solve_exactly
