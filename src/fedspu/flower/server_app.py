"""The app that Flower runs on the server: ``fedspu.flower.server_app:app``."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedspu.engines.flower.log import log, speak
from fedspu.errors import FedSPUError
from fedspu.flower.config import split
from fedspu.flower.server import Server

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Play a run on the devices that are connected."""
    speak()
    try:
        given, deploy = split(context.run_config)
        Server(grid, given, deploy).run()
    except FedSPUError as error:
        log.error("%s", error)
        raise SystemExit(2) from None
