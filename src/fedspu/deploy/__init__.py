"""A real deployment with Flower: one server, devices that keep their own examples.

``layout.py`` says which file is where, ``making.py`` makes them, ``keys.py`` makes keys
and certificates. ``processes.py`` starts everything of Flower; ``serving.py`` and
``supervising.py`` are what runs on the server and on a device. ``checks.py`` tries
every connection and says in words what is wrong.
"""
