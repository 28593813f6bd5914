"""Methods in which every client trains a whole model, whatever its capacity."""
