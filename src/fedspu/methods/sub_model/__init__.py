"""Methods in which a client trains a sub-model that it has the capacity for."""
