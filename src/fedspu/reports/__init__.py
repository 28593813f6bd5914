"""Tables and displays of finished or running runs."""
