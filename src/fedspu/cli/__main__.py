"""``python -m fedspu.cli`` is the ``fedspu`` command."""

from fedspu.cli import main

main()
