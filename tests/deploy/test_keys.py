"""Keys and certificates."""

import shutil
import subprocess
from pathlib import Path

import pytest

from fedspu.deploy import keys
from fedspu.errors import DeploymentError
from tests.deploy.stand_ins import VALID


def test_a_device_key_is_as_ssh_keygen_makes_it(tmp_path: Path) -> None:
    pair = keys.make_device_key()
    assert pair.private.startswith(b"-----BEGIN OPENSSH PRIVATE KEY-----")
    assert pair.public.startswith(b"ecdsa-sha2-nistp384 ")
    assert keys.public_part(pair.private, "key") == pair.public
    if shutil.which("ssh-keygen") is None:
        return
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_bytes(pair.private)
    command = ["ssh-keygen", "-y", "-f", str(file)]
    read = subprocess.run(command, capture_output=True, check=True)
    assert read.stdout.split()[:2] == pair.public.split()


def test_the_comment_of_a_public_key_does_not_count() -> None:
    public = keys.make_device_key().public
    assert keys.mark_of_key(public) == keys.mark_of_key(public.strip() + b" me@home")
    assert keys.mark_of_key(public) != keys.mark_of_key(keys.make_device_key().public)


def test_a_server_certificate_is_for_its_hosts_and_for_this_machine() -> None:
    authority = keys.make_authority(VALID)
    pair = keys.make_server_certificate(authority, ["lab.example", "10.0.0.7"], VALID)
    found = keys.read_certificate(pair.public, "server.crt")
    assert found.names == ("lab.example", "10.0.0.7", *keys.ALWAYS)
    assert found.period == VALID
    assert all(map(found.is_for, ("LAB.example.", "10.0.0.7", "0:0:0:0:0:0:0:1")))
    assert not found.is_for("10.0.0.8")
    assert keys.is_signed_by(pair.public, authority.public)
    assert not keys.is_signed_by(pair.public, keys.make_authority(VALID).public)
    assert keys.belong_together(pair.private, pair.public, "key")
    assert not keys.belong_together(authority.private, pair.public, "key")


def test_keys_of_two_authorities_are_not_mixed_up() -> None:
    one, two = keys.make_authority(VALID), keys.make_authority(VALID)
    with pytest.raises(DeploymentError, match="do not belong together"):
        keys.make_server_certificate(keys.Pair(one.private, two.public), [], VALID)


@pytest.mark.parametrize(
    "content", [b"", b"x", keys.make_authority(VALID).private, b"-----BEGIN X-----"]
)
def test_what_is_no_key_is_refused_without_showing_it(content: bytes) -> None:
    with pytest.raises(DeploymentError, match=r"^key is not a device's key; .*rotate"):
        keys.load_device_key(content, "key")


@pytest.mark.parametrize("content", [b"", b"x", b"-----BEGIN CERTIFICATE-----\n"])
def test_what_is_no_certificate_is_refused(content: bytes) -> None:
    with pytest.raises(DeploymentError, match=r"^it is not a certificate"):
        keys.read_certificate(content, "it")
