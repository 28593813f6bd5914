"""Guards limit what one client can do to the server's model, whatever the method.

``guard.py`` says what a guard is, and which one the settings name.
"""
