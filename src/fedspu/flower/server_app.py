"""The app that Flower runs on the server: ``fedspu.flower.server_app:app``."""

import logging

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
        # Flower notes an exception as the run's end, but would log its traceback too.
        logging.getLogger("flwr").addFilter(lambda record: not record.exc_info)
        raise
