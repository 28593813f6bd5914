"""Clients reached through Flower: on devices, or simulated on this machine."""

import os

# Flower reads these when it is imported. Nothing is reported to its makers, and nothing
# is installed while a run goes on, unless someone asks for it.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns that this will change
}
for _name, _value in QUIET.items():
    os.environ.setdefault(_name, _value)
