"""Export a device's own model, on the device: nothing of it has to leave."""

from dataclasses import replace
from pathlib import Path

from fedspu.deploy.layout import Device as DeviceFolder
from fedspu.errors import SettingsError, StorageError
from fedspu.exports import FORMATS, check_format, check_request
from fedspu.exports.saved_client import described
from fedspu.exports.write import Exported, write_export
from fedspu.flower.config import node_settings
from fedspu.flower.kept_run import DONE, PERSONAL, KeptRun
from fedspu.runs import ready_model


def export_own(
    folder: Path,
    format: str = "safetensors",
    out: Path | None = None,
    *,
    trust: bool = False,
    force: bool = False,
) -> Exported:
    """Write the model of the device whose folder this is, checked beforehand.

    It is that of the last run in which the device took part.
    """
    check_format(format)
    device = DeviceFolder.read(folder)
    out = out or Path(f"{device.name}{FORMATS[format].suffix}")
    check_request(format, out, force)
    kept = KeptRun(last_run(device.models), node_settings(device.node_config))
    if kept.names_code and not trust:
        raise SettingsError(
            f"the run in {kept.folder} names code of its own "
            f"({', '.join(kept.names_code)}), which would be run; if you trust it, add "
            "--trust"
        )
    plan, client, t = kept.plan(), kept.client, kept.round
    if not (plan.method.keeps_own or plan.finishes):
        raise SettingsError(
            f"clients of {plan.method.name} keep no model of their own; export the "
            "server's, on the server"
        )
    memory, examples = kept.memory(plan), kept.examples(plan)
    model = ready_model(plan, examples, t, client, memory, {}, "personal")
    slim = memory.own.active if memory.own else None
    part = examples.part(client, "test")
    found = described(plan, client, t, slim, model, examples.data, part)
    # A device may have examples of a few classes only; the model has all.
    facts = {**found.facts, "num_outputs": str(kept.num_outputs)}
    return write_export(replace(found, facts=facts), format, out, force=force)


def last_run(models: Path) -> Path:
    """The folder of the run in which a device took part last: its newest model's."""
    newest = {
        done.parent: max(file.stat().st_mtime_ns for file in files)
        for done in models.glob(f"*/{DONE}")
        if (files := list(done.parent.glob(f"{PERSONAL}/*.safetensors")))
    }
    if not newest:
        raise StorageError(
            f"{models}: this device has not trained in any run so far, so it has no "
            "model"
        )
    return max(newest, key=lambda run: newest[run])
