"""Ways to reach clients: in this process, or in other processes of this machine."""
