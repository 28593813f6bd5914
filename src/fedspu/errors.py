"""Every error that a user of fedspu can cause or fix.

FedSPUError
├── SettingsError      a setting, flag or configuration file
│   └── MethodError    a function of a method returned the wrong kind of thing
├── DataError          a data set, or the part of it that a client was given
├── ModelError         a model: its shape, its neurons, its output
├── TrainingError      local training went wrong: the loss is not a number
├── StorageError       a run folder: in use, missing, unreadable, disk full
│   └── DamagedError   a file of it is missing, or is not what was saved
└── DeploymentError    a deployment: its files, its server, its devices

The command line prints one of these as a single line and exits with 2.
"""


def how_to_install(extra: str) -> str:
    """The command that installs an optional library."""
    return f"pip install -c constraints.txt -e '.[{extra}]' in the folder of fedspu"


class FedSPUError(Exception):
    """Base of all errors whose message tells the user what to do."""


class SettingsError(FedSPUError):
    """A setting has a value that cannot be used."""


class MethodError(SettingsError):
    """A function of a method returned something that cannot be used."""


class DataError(FedSPUError):
    """The data cannot be read, or cannot be divided as asked."""


class ModelError(FedSPUError):
    """The model cannot be used as it is."""


class TrainingError(FedSPUError):
    """Local training cannot continue."""


class StorageError(FedSPUError):
    """A run folder cannot be read or written."""


class DamagedError(StorageError):
    """A file of a run folder is missing, or is not what was saved."""


class DeploymentError(FedSPUError):
    """A deployment cannot be made, reached or changed."""
