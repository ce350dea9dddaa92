"""Phase 4's own kernels, which the engine does not use, and the tracer under which its tests run every kernel."""
