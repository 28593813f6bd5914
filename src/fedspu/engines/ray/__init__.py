"""Clients on a Ray cluster: the engine, its actors, the cluster and its nodes."""
