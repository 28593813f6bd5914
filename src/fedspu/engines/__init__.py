"""Ways to reach clients: in this process, in others of this machine, on a cluster."""
