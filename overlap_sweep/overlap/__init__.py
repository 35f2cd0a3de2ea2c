"""The domain of tensor-parallel overlap: slots, methods, knobs, their files, and the sizes of models."""
