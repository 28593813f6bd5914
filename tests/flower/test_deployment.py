"""A whole run on real processes: TLS, keys, early stopping, exported models."""

from pathlib import Path

import onnxruntime
import pytest
from safetensors.torch import load_file

from fedspu.data import load
from fedspu.exports.device_client import export_own
from fedspu.federation.storage.saved_run import SavedRun
from fedspu.runs import simulate
from tests.flower.deployment import deployed
from tests.flower.fleet import SETTINGS, complete
from tests.flower.test_rounds import records
from tests.oracles.federation import same_bits

GIVEN = {"rounds": 2, "clients.number": 2, "clients.capacities": (0.5, 1.0)}


@pytest.mark.slow
def test_real_devices_reach_the_same_bits_and_export_their_models(
    tmp_path: Path,
) -> None:
    ready = complete(GIVEN)
    alone = simulate({**SETTINGS, **GIVEN, "out": tmp_path / "alone"})
    with deployed(tmp_path / "lab", ready) as deployment:
        deployment.wait_online()
        ended = deployment.play()
        assert ended.status == "finished:completed", deployment.said("server")
        run = deployment.server.run

    state = SavedRun(run).checkpoint().federation.global_state
    assert same_bits(state, alone.last.federation.global_state)
    assert records(run) == records(tmp_path / "alone")
    for client, t in alone.last.federation.last.items():
        file = tmp_path / f"alone/personal/client-{client}-round-{t}.safetensors"
        own = deployment.personal_file(client, t)
        assert own.read_bytes() == file.read_bytes()

    # What the device exports predicts, without PyTorch.
    device = deployment.devices[0]
    found = export_own(device.root, "onnx", tmp_path / "own.onnx")
    session = onnxruntime.InferenceSession(found.file)
    data = load(device.absolute_data)
    outputs = session.run(None, {session.get_inputs()[0].name: data.x.numpy()})[0]
    assert (outputs.argmax(1) == data.y.numpy()).mean() > 0.3
    assert load_file(deployment.personal_file(0, 2))
