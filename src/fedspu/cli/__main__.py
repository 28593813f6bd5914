"""``python -m fedspu.cli`` is the ``fedspu`` command."""

from fedspu.cli.main import main

main()
