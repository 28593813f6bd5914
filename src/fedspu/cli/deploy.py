"""The ``fedspu deploy`` commands: a real server and real devices, with Flower."""

import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedspu.cli.console import escaped
from fedspu.cli.flags import Json, with_settings
from fedspu.cli.results import print_json
from fedspu.errors import DeploymentError, SettingsError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="A real server and real devices, with Flower (extra: flower). Start with "
    "[bold]fedspu deploy init[/bold].",
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A deployment's folder.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of a device.")]
Days = Annotated[int, typer.Option(help="Days that the server's certificate is valid.")]

MADE_FOR = {
    "out": "the run folder DIR/server/run",
    "engine": "fedspu run --engine",
    "ray_address": "fedspu run --ray-address",
    "workers": "fedspu run --workers",
}
"""Settings that a deployment has no use for, and what there is instead."""


@app.command("init")
@with_settings(
    "--out",
    "--engine",
    "--ray-address",
    "--workers",
    "--clients",
    instead=MADE_FOR,
    as_given=("data.name",),  # a file in each device's own folder
)
def init(
    given: dict[str, Any],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    devices: Annotated[
        str, typer.Option(help="Names separated by commas, like kitchen,hall,attic.")
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name or IP address by which devices reach the server; may be "
            "repeated. They use the first. Default: localhost."
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="The server's port.")] = 8000,
    days: Days = 365,
) -> None:
    """Make all that a server and its devices need: keys, certificates, settings, units.

    Settings are those of [bold]fedspu run[/bold]. --capacities are those of the
    devices, in order; --data is where each device finds its own examples.

    [bold]Examples[/bold]

    fedspu deploy init lab --devices kitchen,hall,attic

    fedspu deploy init lab --devices a,b --host fl.example.org --data arrays:data.npz
    --model mypackage.mymodule:build --capacities 0.2,1

    fedspu deploy init lab experiment.toml --devices a,b --host 192.168.1.10
    """
    from fedspu.deploy.layout import check_host, check_names, check_port

    names = check_names(devices, "--devices")
    hosts = [check_host(name) for name in host or []]
    check_port(port)
    _check_days(days)
    settings, left_out = _settings_for(given, len(names))

    from fedspu.deploy.making import make
    from fedspu.federation.plan import capacities_of

    capacities = dict(zip(names, map(float, capacities_of(settings)), strict=True))
    server = make(folder, settings, capacities, hosts=hosts, port=port, days=days)
    if left_out:
        _say(f"Left out, as a deployment has no use for them: {', '.join(left_out)}")
    if not hosts:
        _say("Only this machine can reach the server; for others, give --host")
    _say(f"Made {server.root}: see its README.md")
    _say(f"Next: `fedspu deploy server {folder}`")


def _settings_for(given: dict[str, Any], number: int) -> tuple[Any, list[str]]:
    """Complete settings for this many devices, and which were left out."""
    from fedspu.resolve import resolve

    left_out = [name for name in MADE_FOR if given.pop(name, None) is not None]
    if given.get("clients.number", number) != number:
        raise SettingsError(
            f"clients.number = {given['clients.number']}: --devices names {number}; "
            "leave clients.number out"
        )
    given["clients.number"] = number
    given.setdefault("clients.per_round", min(number, 10))
    given.setdefault("clients.capacities", [1.0])
    return resolve(given), left_out


def _check_days(days: int) -> None:
    if not 1 <= days <= 3650:
        raise SettingsError(f"--days {days}: expected a number from 1 to 3650")


# Devices and keys ---------------------------------------------------------------------


@app.command()
def add(
    folder: Folder,
    name: Name,
    capacity: Annotated[
        float, typer.Option(help="The share p of neurons that it can train.")
    ] = 1.0,
    data: Annotated[
        str | None,
        typer.Option(help="Where it finds its examples; default: as the others."),
    ] = None,
) -> None:
    """Add a device: its folder in DIR/devices, and its key at the server.

    [bold]Examples[/bold]

    fedspu deploy add lab cellar --capacity 0.4
    """
    from fedspu.data import find_source
    from fedspu.deploy.layout import Server, check_name

    Server.read(folder)
    check_name(name, "NAME")
    if not 0 < capacity <= 1:
        raise SettingsError(f"--capacity {capacity}: expected a number in (0, 1]")
    if data is not None:
        find_source(data)

    from fedspu.deploy import making

    device = making.add(folder, name, capacity, data)
    _say(f"Made {device.root}: copy it to the device, then delete it here")
    _tell_server(folder)


@app.command()
def remove(folder: Folder, name: Name) -> None:
    """Remove a device: the server no longer accepts its key. Its folder stays.

    [bold]Examples[/bold]

    fedspu deploy remove lab attic
    """
    from fedspu.deploy import making
    from fedspu.deploy.layout import Server

    server = Server.read(folder)
    making.remove(folder, name)
    _say(f"{name} is no longer one of the devices")
    left = server.root / "devices" / name
    if left.exists():
        _say(f"Its folder is still there; delete it if you like: {left}")
    _tell_server(folder)


@app.command()
def rotate(folder: Folder, name: Name) -> None:
    """Give a device a new key; the server no longer accepts the old one.

    [bold]Examples[/bold]

    fedspu deploy rotate lab kitchen
    """
    from fedspu.deploy import making

    device = making.rotate(folder, name)
    _say(f"New key: copy {device.root / 'key'} to the device, then delete it here")
    _tell_server(folder)


def _tell_server(folder: Path) -> None:
    """Tell a running server which keys there are now."""
    from fedspu.deploy import control
    from fedspu.deploy.layout import Server

    server = Server.read(folder)
    if not control.is_running(server):
        _say("The server does not run; it will know when it starts")
        return
    for line in control.register(server):
        _say(line)


@app.command()
def renew(folder: Folder, days: Days = 365) -> None:
    """Make a new certificate for the server, by the same authority.

    [bold]Examples[/bold]

    fedspu deploy renew lab
    """
    _check_days(days)
    from fedspu.deploy import making

    found = making.renew(folder, days)
    _say(f"Valid until {found.period.end:%Y-%m-%d}; restart the server to use it")


# In the foreground --------------------------------------------------------------------


@app.command()
def server(
    folder: Folder,
    bind: Annotated[
        str | None,
        typer.Option(
            help="The address of this machine to listen on; default: bind in "
            "server.toml."
        ),
    ] = None,
) -> None:
    """Run the server in the foreground, until Ctrl-C or SIGTERM.

    [bold]Examples[/bold]

    fedspu deploy server lab
    """
    from dataclasses import replace

    from fedspu.deploy.layout import Server

    found = Server.read(folder)
    if bind is not None:
        found = replace(found, bind=bind)
    from fedspu.deploy.serving import serve

    serve(found, _say)


@app.command()
def device(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="This device's folder.")
    ],
    begin_anew: Annotated[
        bool,
        typer.Option(
            "--begin-anew",
            help="If this device's own model is lost, begin with a new one. Without "
            "this, the device waits until its files are put back.",
        ),
    ] = False,
) -> None:
    """Keep this device connected, until Ctrl-C or SIGTERM; says why if it cannot be.

    [bold]Examples[/bold]

    fedspu deploy device kitchen
    """
    from fedspu.deploy.layout import Device

    found = Device.read(folder)
    from fedspu.deploy.supervising import supervise

    supervise(found, _say, begin_anew)


# Runs ---------------------------------------------------------------------------------


@app.command()
def start(folder: Folder, as_json: Json = False) -> None:
    """Start the run on the devices, or carry on with one that was stopped.

    [bold]Examples[/bold]

    fedspu deploy start lab
    """
    from fedspu.deploy import control

    found = _running(folder)
    run = control.start_run(found)
    if as_json:
        print_json({"run": run, "folder": str(found.run)})
        return
    _say(f"Started run {run}")
    _say(f"Watch it: `fedspu deploy status {folder}`, `fedspu deploy logs {folder}`")


@app.command()
def stop(folder: Folder, as_json: Json = False) -> None:
    """Stop the run; what is saved stays, and a later start carries on.

    [bold]Examples[/bold]

    fedspu deploy stop lab
    """
    from fedspu.deploy import control

    run = control.stop_run(_running(folder))
    if as_json:
        print_json({"run": run})
        return
    _say(f"Stopped run {run}; carry on with `fedspu deploy start {folder}`")


@app.command()
def status(folder: Folder, as_json: Json = False) -> None:
    """Say how far the run is, and which devices are online.

    [bold]Examples[/bold]

    fedspu deploy status lab --json
    """
    from fedspu.deploy import control

    found = _running(folder)
    listed, states = control.runs(found), control.device_states(found)
    saved = control.rounds_saved(found)
    if as_json:
        facts = {
            "runs": [asdict(run) for run in listed],
            "saved": saved,
            "devices": states,
        }
        print_json(facts)
        return
    if not listed:
        _say(f"No run yet; start one with `fedspu deploy start {folder}`")
    for run in listed[-1:]:
        _say(f"Run {run.id}: {run.in_words}")
        if run.status == "finished:failed":
            _say(
                f"See why with `fedspu deploy logs {folder}`; carry on from the last "
                f"saved round with `fedspu deploy start {folder}`"
            )
    if saved:
        _say(f"Rounds saved: {saved['rounds']}, in {saved['folder']}")
    width = max(map(len, states))
    for name, state in states.items():
        _say(f"{name:<{width}}  {state}")


@app.command()
def logs(
    folder: Folder,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on as the run does, until Ctrl-C.")
    ] = False,
) -> None:
    """Show what the latest run has logged.

    [bold]Examples[/bold]

    fedspu deploy logs lab --follow
    """
    from fedspu.deploy import control
    from fedspu.deploy.processes import environment, flwr_logs

    found = _running(folder)
    listed = control.runs(found)
    if not listed:
        raise DeploymentError(
            f"no run yet; start one with `fedspu deploy start {folder}`"
        )
    command = flwr_logs(found, listed[-1].id, follow)
    done = subprocess.run(command, env=environment(found.home), check=False)
    if done.returncode:
        raise DeploymentError("the log cannot be shown; the lines above say why")


def _running(folder: Path) -> Any:
    """The deployment in a folder, whose server runs."""
    from fedspu.deploy.layout import Server

    found = Server.read(folder)
    from fedspu.deploy.control import reach_server

    try:
        reach_server(found)
    except DeploymentError:
        raise DeploymentError(
            f"the server does not run on this machine; start it with `fedspu deploy "
            f"server {folder}`, or see what `fedspu deploy check {folder}` says"
        ) from None
    return found


# Checks -------------------------------------------------------------------------------


@app.command()
def check(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="On the server's machine: DIR. On a device: the device's folder.",
        ),
    ],
    as_json: Json = False,
) -> None:
    """Try every connection and every file, and say in words what is wrong.

    The exit code is 0 only if nothing is wrong.

    [bold]Examples[/bold]

    fedspu deploy check lab

    fedspu deploy check lab/devices/kitchen
    """
    from fedspu.deploy.layout import Device, Server

    is_device = (folder / "device.toml").is_file()
    part: Any = Device.read(folder) if is_device else Server.read(folder)
    from fedspu.deploy import checks

    found = []
    console = Console(soft_wrap=True, highlight=False)
    for finding in (
        checks.check_device(part) if is_device else checks.check_server(part)
    ):
        found.append(finding)
        if not as_json:
            console.print(
                f"{MARKS[finding.state]} {finding.what}: {escaped(finding.text)}"
            )
    num_wrong = sum(finding.is_wrong for finding in found)
    if as_json:
        facts = {"is_well": not num_wrong, "findings": [asdict(f) for f in found]}
        print_json(facts)
    if num_wrong:
        things = "1 thing is" if num_wrong == 1 else f"{num_wrong} things are"
        raise DeploymentError(f"{things} wrong; the lines above say what to do")


MARKS = {"ok": "[green]✓[/]", "warning": "[yellow]![/]", "wrong": "[bold red]✗[/]"}


def _say(text: str) -> None:
    """Print one line at once, also where it is written to a file."""
    Console(soft_wrap=True, highlight=False).print(escaped(text))
