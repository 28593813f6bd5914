"""The federated methods, by name; one file each."""

from fedspu.errors import SettingsError
from fedspu.methods.anchors import fedavg, local
from fedspu.methods.fedspu import fedspu
from fedspu.methods.method import Method
from fedspu.settings import nearest

METHODS: dict[str, Method] = {method.name: method for method in (fedspu, fedavg, local)}


def find_method(name: str) -> Method:
    """The method of this name."""
    if name not in METHODS:
        raise SettingsError(
            f"method = {name!r}: expected one of {', '.join(METHODS)}"
            f"{nearest(name, list(METHODS))}"
        )
    return METHODS[name]
