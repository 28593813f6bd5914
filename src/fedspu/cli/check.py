"""``fedspu check``: what of a run folder is whole."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedspu.cli.flags import Json
from fedspu.cli.results import print_json
from fedspu.errors import DamagedError


def check(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    as_json: Json = False,
) -> None:
    """Read every file of a run folder, and say what is whole and what is damaged.

    Nothing is changed. The exit code is 0 if all is whole, else 2.

    [bold]Examples[/bold]

    fedspu check runs/digits-fedspu-seed-0
    """
    from fedspu.federation.storage.finding import check_is_run

    check_is_run(run)

    from fedspu.federation.storage.check import check_run

    found = check_run(run)
    if as_json:
        saves = [asdict(save) | {"is_whole": save.is_whole} for save in found.saves]
        facts = {
            "run": str(run),
            "is_whole": found.is_whole,
            "is_finished": found.is_finished,
            "settings": found.settings,
            "in_the_way": found.in_the_way,
            "saves": saves,
            "advice": found.advice,
        }
        print_json(facts)
    else:
        console = Console(soft_wrap=True, highlight=False)
        for save in found.saves:
            state = "whole" if save.is_whole else "damaged"
            line = f"Save after round {save.round}: {state}"
            if save.num_clients:
                line += f" (models of {save.num_clients} clients)"
            console.print(line, markup=False)
            for problem in (*save.damage, *save.lost_clients.values()):
                console.print(f"  {problem}", markup=False)
        for problem in (found.settings, found.in_the_way):
            if problem:
                console.print(problem, markup=False)
        console.print(found.advice, markup=False)
    if not found.is_whole:
        raise DamagedError(f"{run} is damaged")
