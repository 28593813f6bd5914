"""The pure core: tensors in, tensors out; no files, prints, clocks or clients."""
