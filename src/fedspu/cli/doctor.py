"""``fedspu doctor``: what this machine has, and what runs where."""

from rich.console import Console

from fedspu.cli.flags import Json
from fedspu.cli.results import print_json


def doctor(as_json: Json = False) -> None:
    """Say what was found on this machine, what runs where, and how fast.

    Small networks that are a chain of layers run as compiled code, if there is a C++
    compiler; everything else is run by PyTorch.
    """
    from fedspu.reports.doctor import doctor_table, machine_lines
    from fedspu.reports.doctor import look as look_around
    from fedspu.reports.profile import progress

    with progress() as say:
        say("measuring how fast this machine is …")
        found = look_around()
    if as_json:
        print_json(found)
        return
    console = Console(soft_wrap=True, highlight=False)
    for line in machine_lines(found):
        console.print(line, markup=False)
    console.print(doctor_table(found))
