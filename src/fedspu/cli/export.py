"""``fedspu export``: a client's model as one file for inference."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedspu.cli.flags import Json
from fedspu.cli.results import print_json
from fedspu.errors import SettingsError
from fedspu.exports import FORMATS, check_format, check_request, default_file
from fedspu.units import shown, size

if TYPE_CHECKING:
    from fedspu.exports.write import Exported

_WORDS = "; ".join(f"{name}: for {entry.runs_on}" for name, entry in FORMATS.items())


def export(
    run: Annotated[
        Path, typer.Argument(help="A run folder; on a device, the device's folder.")
    ],
    client: Annotated[
        int | None,
        typer.Argument(help="The client, from 0 upwards; a device needs none."),
    ] = None,
    format: Annotated[str, typer.Option("--format", help=f"{_WORDS}.")] = "safetensors",
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file; default: named by run and client, in the working folder."
        ),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Run code that the run's settings name."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the file if it exists.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a client's personal model as one file for inference, and check it first.

    The file is made in a temporary place, loaded again by its own runtime, and run on
    all of the client's test examples, in batches and one alone. It is put in its place
    only if it gives the outputs that PyTorch gives.

    [bold]Examples[/bold]

    fedspu export runs/digits-fedspu-seed-0 3

    fedspu export runs/digits-fedspu-seed-0 3 --format onnx --out client-3.onnx

    fedspu export runs/mine 3 --format torch-export --trust

    fedspu export lab/devices/kitchen --format onnx

    In Python: fedspu.export("runs/mine", 3, "onnx", build=build, data=(x, y))
    """
    check_format(format)

    found = _export(run, client, format, out, trust, force)
    if as_json:
        print_json({**asdict(found), "file": str(found.file)})
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(_what_was_checked(found), markup=False)
    console.print(_what_was_written(found), markup=False)


def _export(
    run: Path, client: int | None, format: str, out: Path | None, *how: bool
) -> "Exported":
    from fedspu.federation.storage.finding import check_is_run

    trust, force = how
    is_device = (run / "device.toml").is_file()
    if is_device and client is not None:
        raise SettingsError(f"{run}: a device has one client: leave {client} out")
    if not is_device and client is None:
        check_is_run(run)
        raise SettingsError(
            f"{run}: expected a client's number after the run, from 0 upwards: "
            f"`fedspu export {run} 0`"
        )
    if client is None:
        from fedspu.exports.device_client import export_own

        return export_own(run, format, out, trust=trust, force=force)
    check_is_run(run)
    check_request(format, out or default_file(run, client, format), force)

    from fedspu.exports.saved_client import export as export_client

    return export_client(run, client, format, out, trust=trust, force=force)


def _what_was_checked(found: "Exported") -> str:
    checked = found.checked
    apart = "the same bits"
    if checked.largest_difference:
        apart = (
            f"outputs differ by at most {checked.largest_difference:.1e} (allowed: "
            f"{checked.tolerance:.1e})"
        )
    ours, theirs = (shown(value, checked.is_share) for value in checked.values)
    return (
        f"Checked on the client's {checked.num_examples} test examples, in batches and "
        f"alone: {apart}; {checked.metric} {theirs}, in PyTorch {ours}."
    )


def _what_was_written(found: "Exported") -> str:
    facts, opset = found.facts, ""
    if "opset" in facts:
        opset = f", opset {facts['opset']}"
    shape = facts["input_shape"].replace(",", " x ")
    return (
        f"Written: {found.file} ({size(found.num_bytes)}; {found.format}{opset}; takes "
        f"batches of any size of {shape} {facts['input_dtype']})."
    )
