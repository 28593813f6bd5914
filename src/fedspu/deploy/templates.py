"""The text files of a deployment: systemd units, compose files, its README."""

import getpass
import sys
from pathlib import Path

from fedspu.deploy.layout import Device, Server

UNIT = """\
# {about}
[Unit]
Description={description}
After=network-online.target
Wants=network-online.target

[Service]
ExecStart={command}
User={user}
WorkingDirectory={plain}
Environment={cache}
Restart=always
RestartSec=5
# It ends its own processes; what is left after this time is killed.
KillMode=mixed
TimeoutStopSec=60
UMask=0077
# It can write only in its own folder, and can gain no rights.
ReadWritePaths={quoted}
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
NoNewPrivileges=yes
CapabilityBoundingSet=
RestrictSUIDSGID=yes
RestrictRealtime=yes
RestrictNamespaces=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
LockPersonality=yes
ProtectClock=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
SystemCallArchitectures=native

[Install]
WantedBy=multi-user.target
"""


def server_unit(server: Server) -> str:
    """A systemd unit for the server, with the paths of this machine."""
    return _unit(
        about="Copy to /etc/systemd/system/fedspu-server.service.",
        description="fedspu server",
        command=[str(_fedspu()), "deploy", "server", str(server.root)],
        user=getpass.getuser(),
        folder=str(server.folder),
    )


def device_unit(device: Device) -> str:
    """A systemd unit for a device; its two paths and the user are to be adapted."""
    folder = f"/var/lib/fedspu/{device.name}"
    return _unit(
        about="Copy to /etc/systemd/system/fedspu-device.service. Adapt: where fedspu "
        "is\n# installed, where this folder is, and the user that owns it.",
        description=f"fedspu device {device.name}",
        command=["/opt/fedspu/bin/fedspu", "deploy", "device", folder],
        user="fedspu",
        folder=folder,
    )


def _unit(
    about: str, description: str, command: list[str], user: str, folder: str
) -> str:
    return UNIT.format(
        about=about,
        description=description,
        command=" ".join(map(_quoted, command)),
        user=user,
        plain=folder.replace("%", "%%"),
        cache=_quoted(f"XDG_CACHE_HOME={folder}/cache"),
        quoted=_quoted(folder),
    )


def _fedspu() -> Path:
    """The command fedspu of the Python that is running."""
    return Path(sys.executable).parent / "fedspu"


def _quoted(word: str) -> str:
    """A word as systemd reads it: % begins a specifier, spaces part words."""
    text = word.replace("\\", "\\\\").replace("%", "%%").replace('"', '\\"')
    return text if text.isascii() and " " not in text else f'"{text}"'


COMPOSE = """\
# {about}
services:
  {service}:
    image: ${{FEDSPU_IMAGE:-fedspu}}
    command: {command}
    user: "${{FEDSPU_USER:-1000:1000}}"
    volumes:
      - .:{inside}
    environment:
      HOME: /tmp
      XDG_CACHE_HOME: {inside}/cache
{ports}    restart: unless-stopped
    stop_grace_period: 60s
    init: true
    read_only: true
    tmpfs:
      - /tmp
    cap_drop:
      - ALL
    security_opt:
      - no-new-privileges:true
"""


def server_compose(server: Server) -> str:
    """A compose file for the server."""
    words = ["fedspu", "deploy", "server", "/deployment", "--bind", "0.0.0.0"]
    return COMPOSE.format(
        about="The server in a container: docker compose up -d, in this folder.",
        service="server",
        command=_yaml_list(words),
        inside="/deployment/server",
        ports=f'    ports:\n      - "{server.port}:{server.port}"\n',
    )


def device_compose(device: Device) -> str:
    """A compose file for a device."""
    return COMPOSE.format(
        about="This device in a container: docker compose up -d, in this folder.",
        service=f"device-{device.name.lower()}",
        command=_yaml_list(["fedspu", "deploy", "device", "/device"]),
        inside="/device",
        ports="",
    )


def _yaml_list(words: list[str]) -> str:
    return "[" + ", ".join(f'"{word}"' for word in words) + "]"


README = """\
# A deployment of fedspu

On the server's machine (which needs only `server/`; keep `ca/` to yourself):

    fedspu deploy server {root}     # runs until Ctrl-C
    fedspu deploy check {root}      # in another terminal

On each device, with its own folder of `devices/`, copied there (here: {names}):

    scp -rp {root}/devices/{first} {first}:      # then delete the copy here
    fedspu deploy check {first}     # on the device
    fedspu deploy device {first}    # runs until Ctrl-C

Back on the server's machine:

    fedspu deploy start {root}      # the settings are in server/app/pyproject.toml
    fedspu deploy status {root}
    fedspu deploy logs {root}
    fedspu deploy stop {root}       # a later start carries on

Devices reach the server at {address}. As services: `server/superlink.service` and
`devices/*/supernode.service` for systemd, `compose.yaml` beside them for containers.
The keys (`ca/ca.key`, `server/server.key`, `devices/*/key`) are secrets; send them only
over a connection that you trust. `docs/deploy.md` of fedspu says more.
"""


def readme(server: Server) -> str:
    """The deployment's README."""
    names = list(server.capacities)
    return README.format(
        root=server.root,
        names=", ".join(names),
        first=names[0],
        address=server.public_address,
    )
