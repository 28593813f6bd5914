"""Ask the server whether it knows a device's key."""

from enum import Enum
from typing import Any

from fedspu.deploy.keys import load_device_key
from fedspu.deploy.layout import Device
from fedspu.errors import DeploymentError
from fedspu.files import read_file

IMPOSSIBLE = 0.0
"""A heartbeat interval that no server accepts, so that asking changes nothing."""


class Knows(Enum):
    """What the server says about a key."""

    YES = "registered"
    NO = "not registered"
    CLOCK = "refused"  # it is signed with the time, and that is too far off


def ask(device: Device) -> Knows:
    """Whether the server knows the device's key; nothing changes there.

    The request is the one with which a device says that it is there, but with an
    interval that is refused. A key that is not known is refused before that.
    """
    import httpx
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.error import ApiErrorCode, FlowerError
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    private = load_device_key(read_file(device.key), str(device.key))
    public = private.public_key()
    request: Any = ActivateNodeRequest(
        public_key=public_key_to_bytes(public), heartbeat_interval=IMPOSSIBLE
    )
    with FleetHttpClient.from_server_address(
        device.server,
        insecure=False,
        root_certificates=read_file(device.authority),
        interceptors=[NodeAuthHttpInterceptor(private, public)],
    ) as client:
        try:
            client.ActivateNode(request)
        except httpx.HTTPStatusError as error:
            said = FlowerError.from_json(error.response.text)
            if error.response.status_code == httpx.codes.UNAUTHORIZED:
                return Knows.CLOCK
            if said and said.code == ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL:
                return Knows.YES
            if said and said.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
                return Knows.NO
            raise DeploymentError(
                f"the server at {device.server} answered in a way that this version of "
                f"Flower does not know (status {error.response.status_code})"
            ) from None
        except httpx.HTTPError as error:
            raise DeploymentError(
                f"the connection to {device.server} broke off ({error})"
            ) from None
    raise DeploymentError(
        f"the server at {device.server} accepted an impossible request; is it a "
        "SuperLink of Flower?"
    )
