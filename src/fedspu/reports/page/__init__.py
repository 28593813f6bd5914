"""The report: one HTML file that shows runs in words, pictures and tables."""
