"""A run on devices, through real Flower messages and apps, without a network."""

import json
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, Message

from fedspu.engines.flower import fleet
from fedspu.errors import FedSPUError, SettingsError, StorageError
from fedspu.federation.plan import Plan
from fedspu.federation.rounds import Round
from fedspu.federation.server import Federation, choose_clients
from fedspu.federation.storage.run_folder import RunFolder
from fedspu.federation.storage.saved_run import SavedRun
from fedspu.flower.client_app import app
from fedspu.flower.config import split
from fedspu.flower.server import Server
from fedspu.runs import simulate
from tests.flower.fleet import NAMES, SETTINGS, House
from tests.flower.grid import Nodes
from tests.oracles.federation import same_bits

METHODS = ("fedspu", "fedspu-plus", "feddrop", "ditto")
"""Random neurons, a last turn for everyone, slim models, memory besides."""


def records(path: Path) -> list[Any]:
    names = ("rounds.jsonl", "clients.jsonl")
    return [json.loads(x) for n in names for x in (path / n).read_text().splitlines()]


FROZEN = "tests.flower.fleet:with_a_frozen_base"


@pytest.mark.parametrize(
    "given", [*({"method.name": name} for name in METHODS), {"model": FROZEN}]
)
def test_devices_reach_the_same_bits_as_one_process(
    given: dict[str, Any], tmp_path: Path
) -> None:
    house = House(tmp_path, given)
    house.start(0, 1, 2)
    last = house.serve().last.federation
    alone = simulate({**SETTINGS, **given, "out": tmp_path / "alone"})
    assert same_bits(last.global_state, alone.last.federation.global_state)
    assert last.last == alone.last.federation.last
    assert last.stopped == alone.last.federation.stopped
    for client, t in last.last.items():
        own = tmp_path / f"alone/personal/client-{client}-round-{t}.safetensors"
        assert house.memory(client, t) == own.read_bytes()
    assert records(tmp_path / "run") == records(tmp_path / "alone")


def test_nodes_of_a_flower_simulation_reach_the_same_bits(tmp_path: Path) -> None:
    """Without devices: data and capacity by number, memories in Flower's state."""
    alone = simulate(SETTINGS)
    house = House(tmp_path)
    config = {
        **house.config,
        "clients.number": 3,
        "clients.capacities": "0.2, 0.6, 1.0",
    }
    grid = Nodes(config)
    for number in (2, 0, 1):
        grid.add({"partition-id": number, "num-partitions": 3}, app)
    server = Server(grid, *split(config), poll=0.001)
    server.run()
    last = server.last.federation
    assert same_bits(last.global_state, alone.last.federation.global_state)


def test_a_run_ends_once_every_device_has_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(tmp_path, {"rounds": 50, "train.lr": 0.5})
    house.start(0, 1, 2)
    last = house.serve().last.federation
    assert last.stopped == {0, 1, 2}
    assert last.round < 50
    assert f"finished after round {last.round}: every device has stopped" in caplog.text
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["stopped_clients"] == 3


# Interrupted runs ---------------------------------------------------------------------


class PowerCutError(Exception):
    pass


def cut_after(t: int) -> Any:
    def watch(plan: Plan, played: Round) -> None:
        if played.federation.round == t:
            raise PowerCutError

    return watch


def wanted(folder: Path) -> tuple[Any, list[Any]]:
    house = House(folder)
    house.start(0, 1, 2)
    return house.serve().last.federation, records(folder / "run")


def test_a_server_that_died_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    whole, lines = wanted(tmp_path / "a")
    house = House(tmp_path / "b")
    house.start(0, 1, 2)
    with pytest.raises(PowerCutError):
        house.serve(cut_after(1))
    for client in range(3):  # devices start anew as well: other node ids
        house.stop(client)
        house.start(client)
    last = house.serve().last.federation
    assert same_bits(last.global_state, whole.global_state)
    assert records(tmp_path / "b/run") == lines


def test_a_round_that_only_devices_remember_is_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, lines = wanted(tmp_path / "a")
    house = House(tmp_path / "b")
    house.start(0, 1, 2)
    save = RunFolder.save

    def fail(self: RunFolder, played: Round, lines: Any) -> None:
        if played.federation.round == 2:
            raise PowerCutError
        save(self, played, lines)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", fail)
        with pytest.raises(PowerCutError):
            house.serve()
    assert SavedRun(tmp_path / "b/run").round == 1
    last = house.serve().last.federation
    assert same_bits(last.global_state, whole.global_state)
    assert records(tmp_path / "b/run") == lines


def test_other_settings_are_not_resumed(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.start(0, 1, 2)
    with pytest.raises(PowerCutError):
        house.serve(cut_after(1))
    with pytest.raises(StorageError, match=r"train.lr = 9.*began with"):
        house.serve(changes={"train.lr": 9.0})
    with pytest.raises(StorageError, match="is in use already; choose another"):
        house.serve(changes={"deploy.resume": False})


def test_a_run_of_one_machine_is_not_resumed_on_devices(tmp_path: Path) -> None:
    house = House(tmp_path)
    simulate({**SETTINGS, "rounds": 1, "out": tmp_path / "run"})
    with pytest.raises(StorageError, match="is a run on one machine"):
        house.serve()


# Who is there -------------------------------------------------------------------------


def test_a_device_that_is_cut_off_is_not_chosen_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"rounds": 4, "clients.per_round": 3, "early_stopping.on": False}
    house = House(tmp_path, given)
    house.start(0, 1, 2)

    def watch(plan: Plan, played: Round) -> None:
        if played.federation.round == 1:
            house.stop(1)
        if played.federation.round == 3:
            house.start(1)

    server = house.serve(watch)
    cohorts = [sorted(played.answers) for played in house.seen]
    assert cohorts == [[0, 1, 2], [0, 2], [0, 2], [0, 1, 2]]
    assert caplog.messages.count("hall is no longer connected") == 1
    assert not server.last.federation.stopped
    lines = records(tmp_path / "run")[:4]
    assert [line["stopped_clients"] for line in lines] == [0] * 4


def test_a_device_that_joins_later_takes_part_from_then_on(tmp_path: Path) -> None:
    given = {"rounds": 3, "clients.per_round": 3, "early_stopping.on": False}
    house = House(tmp_path, given)
    house.start(0, 2)

    def watch(plan: Plan, played: Round) -> None:
        if played.federation.round == 1:
            house.start(1)

    server = house.serve(watch, {"deploy.devices": 2})
    cohorts = [sorted(played.answers) for played in house.seen]
    assert cohorts == [[0, 1], [0, 1, 2], [0, 1, 2]]
    assert server.names == ["attic", "kitchen", "hall"]
    found = json.loads((tmp_path / "run/devices.json").read_text())
    assert found == {"0": "attic", "1": "kitchen", "2": "hall"}
    # and it is still there when the run goes on
    again = house.serve(changes={"rounds": 4})
    assert again.names == server.names
    assert again.last.federation.round == 4


def test_too_few_devices_are_waited_for_and_then_named(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.start(0)
    with pytest.raises(FedSPUError, match=r"1 of 3 devices are connected .* \(attic\)"):
        house.serve(changes={"deploy.wait": 0.05})
    assert not (tmp_path / "run").exists()


def test_a_run_without_any_device_left_says_what_is_saved(tmp_path: Path) -> None:
    house = House(tmp_path, {"early_stopping.on": False})
    house.start(0, 1, 2)

    def watch(plan: Plan, played: Round) -> None:
        for client in range(3):
            if NAMES[client] in house.nodes:
                house.stop(client)

    with pytest.raises(FedSPUError, match=r"rounds up to 1 are saved"):
        house.serve(watch, {"deploy.wait": 0.05})
    house.start(0, 1, 2)
    assert house.serve().last.federation.round == 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "attic"}, "another device with this name is connected"),
        ({"capacity": 7}, "capacity = 7"),
        (
            {"data": "arrays:nowhere.npz"},
            "kitchen cannot take part: it cannot use its own examples",
        ),
    ],
)
def test_a_device_that_cannot_take_part_is_named_and_told_why(
    change: dict[str, Any],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    house = House(tmp_path)
    house.start(0, 1)
    house.start(2, **change)
    caplog.set_level("INFO", "fedspu")
    server = house.serve(changes={"deploy.devices": 2})
    assert server.names == ["attic", "hall"]
    assert reason in caplog.text


def test_a_device_with_another_task_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(tmp_path)
    house.start(0, 1)
    other = Nodes({**house.config, "task": "regression"})
    node = house.grid.add(house.node_config(2), app)
    house.grid.answers[node] = other.answers[other.add(house.node_config(2), app)]
    house.serve(changes={"deploy.devices": 2, "rounds": 1})
    assert "kitchen cannot take part" in caplog.text
    assert all(2 not in played.answers for played in house.seen)


def test_a_device_with_another_model_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(tmp_path)
    house.start(0, 1)
    node = house.grid.add(house.node_config(2), app)
    answer = house.grid.answers[node]
    other = Nodes({**house.config, "model": "mlp"})
    house.grid.answers[node] = other.answers[other.add(house.node_config(2), app)]
    assert answer is not house.grid.answers[node]
    caplog.set_level("INFO", "fedspu")
    house.serve()
    assert "kitchen cannot take part: its model is not the server's" in caplog.text
    assert all(2 not in played.answers for played in house.seen)


@pytest.mark.parametrize("what", ["net", "frozen values"])
def test_a_device_with_another_model_takes_part_once_that_is_mended(
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {"clients.per_round": 3, "early_stopping.on": False, "model": FROZEN}
    house = House(tmp_path, given)
    house.start(0, 1, 2)
    change = ("SCALE", -1.0) if what == "frozen values" else ("WIDTH", 23)
    node = house.nodes["kitchen"]
    answer = house.grid.answers[node]

    def elsewhere(message: Message) -> Message | None:
        with monkeypatch.context() as patch:
            patch.setattr(f"tests.flower.fleet.{change[0]}", change[1])
            return answer(message)

    house.grid.answers[node] = elsewhere
    monkeypatch.setattr(fleet, "AGAIN_SECONDS", 0.0)

    def watch(plan: Plan, played: Round) -> None:
        if played.federation.round == 1:
            house.grid.answers[node] = answer

    house.serve(watch)
    assert "kitchen cannot take part: its model is not the server's" in caplog.text
    wanted = {"net": "other neurons", "frozen values": "parameters that never train"}
    assert wanted[what] in caplog.text
    assert [len(played.answers) for played in house.seen] == [2, 3, 3]


def test_a_device_that_cannot_take_part_is_asked_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"clients.per_round": 3, "early_stopping.on": False, "rounds": 3}
    house = House(tmp_path, given)
    house.start(0, 1, 2)
    file = tmp_path / "hall.npz"
    file.rename(tmp_path / "away.npz")
    monkeypatch.setattr(fleet, "AGAIN_SECONDS", 0.0)

    def watch(plan: Plan, played: Round) -> None:
        if played.federation.round == 1:
            (tmp_path / "away.npz").rename(file)

    server = house.serve(watch, {"deploy.devices": 2})
    assert server.names == ["attic", "kitchen", "hall"]
    assert [len(played.answers) for played in house.seen] == [2, 3, 3]
    refusals = [r for r in caplog.messages if r.startswith("hall cannot take part")]
    assert len(refusals) == 1  # said once, asked often


def test_devices_that_cannot_take_part_are_named_when_too_few_are_there(
    tmp_path: Path,
) -> None:
    house = House(tmp_path)
    house.start(0, 1)
    house.start(2, data="arrays:nowhere.npz")
    words = r"\(attic, hall; kitchen: it cannot use its own examples"
    with pytest.raises(FedSPUError, match=words):
        house.serve(changes={"deploy.wait": 0.05})


def test_a_run_ends_if_only_devices_that_stay_away_have_not_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(tmp_path, {"rounds": 50, "train.lr": 0.5, "clients.per_round": 3})
    house.start(0, 1, 2)

    def watch(plan: Plan, played: Round) -> None:
        if played.federation.round == 1:
            house.stop(1)

    last = house.serve(watch, {"deploy.wait": 0.05}).last.federation
    assert last.stopped == {0, 2}
    assert "have stopped, and hall did not come back within 0.05 s" in caplog.text
    assert (tmp_path / "run/summary.json").exists()


# Lost messages ------------------------------------------------------------------------


def test_a_slow_device_is_missing_and_the_round_goes_on(tmp_path: Path) -> None:
    given = {"clients.per_round": 3, "early_stopping.on": False, "rounds": 2}
    house = House(tmp_path, given)
    house.start(0, 1, 2)
    node = house.nodes["hall"]
    answer = house.grid.answers[node]

    def slow(message: Message) -> Message | None:
        reply = answer(message)
        if reply is not None and message.metadata.message_type == "train":
            reply.__dict__["seconds"] = 60.0
        return reply

    house.grid.answers[node] = slow
    house.serve(changes={"clients.deadline": 1.5})
    assert [played.missing for played in house.seen] == [
        {1: "no answer within 1.5 s"}
    ] * 2
    assert sorted(house.seen[-1].federation.last) == [0, 2]


def test_a_device_that_was_late_is_not_waited_for_until_it_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a SuperNode does, it takes up no message before the last one is done."""
    given = {"clients.per_round": 3, "early_stopping.on": False, "rounds": 5}
    house = House(tmp_path, given)
    house.start(0, 1, 2)
    node = house.nodes["hall"]
    answer = house.grid.answers[node]
    is_busy = False

    def slow(message: Message) -> Message | None:
        nonlocal is_busy
        is_first = message.metadata.group_id == "2" and not is_busy
        is_busy = is_busy or is_first
        return None if is_busy else answer(message)

    house.grid.answers[node] = slow

    def watch(plan: Plan, played: Round) -> None:
        if played.federation.round == 4:  # it is done; the SuperLink has kept messages
            house.grid.answers[node] = answer
            for sent in house.grid.sent[-20:]:
                if sent.metadata.dst_node_id == node and sent.metadata.ttl > 100:
                    house.grid.push_again(sent)

    began = monotonic()
    house.serve(watch, {"clients.deadline": 3.0})
    asked = [sorted({*r.answers, *r.missing}) for r in house.seen]
    assert asked == [[0, 1, 2], [0, 1, 2], [0, 2], [0, 2], [0, 1, 2]]
    assert house.seen[1].missing == {1: "no answer within 3 s"}
    assert "hall is late; the rounds go on without it" in caplog.text
    assert monotonic() - began < 60


def test_a_device_that_was_busy_when_it_was_asked_is_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(tmp_path, {"rounds": 1})
    house.start(0, 1, 2)
    node = house.nodes["hall"]
    answer = house.grid.answers[node]

    def busy(message: Message) -> Message | None:
        house.grid.answers[node] = answer
        return Message(Error(code=3, reason="expired"), reply_to=message)

    house.grid.answers[node] = busy
    assert house.serve().names == ["attic", "hall", "kitchen"]
    assert "cannot take part" not in caplog.text


def test_a_message_whose_time_is_over_is_said_to_be_late(tmp_path: Path) -> None:
    given = {"clients.per_round": 3, "early_stopping.on": False, "rounds": 1}
    house = House(tmp_path, given)
    house.start(0, 1, 2)
    node = house.nodes["hall"]
    answer = house.grid.answers[node]

    def expired(message: Message) -> Message | None:
        if message.metadata.message_type != "train":
            return answer(message)
        return Message(Error(code=3, reason="expired"), reply_to=message)

    house.grid.answers[node] = expired
    house.serve(changes={"clients.deadline": 20.0})
    assert house.seen[0].missing == {1: "no answer within 20 s"}


def test_error_replies_are_missing_clients(tmp_path: Path) -> None:
    given = {"clients.per_round": 3, "early_stopping.on": False, "rounds": 2}
    house = House(tmp_path, given)
    house.start(0, 1, 2)
    node = house.nodes["hall"]
    answer = house.grid.answers[node]

    def broken(message: Message) -> Message | None:
        if message.metadata.message_type != "train":
            return answer(message)
        error = Message(Error(code=5, reason="secret"), reply_to=message)
        # In the name of a lost node the SuperLink answers, whose id is 1.
        error.metadata.__dict__["_src_node_id"] = 1
        return error

    house.grid.answers[node] = broken
    house.serve()
    assert house.seen[0].missing == {1: "its connection was lost"}
    assert "secret" not in json.dumps(records(tmp_path / "run"))


def test_a_failed_turn_says_nothing_of_the_examples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedspu.federation.client import Client

    take_turn = Client.take_turn

    def fail(self: Client, request: Any, memory: Any) -> Any:
        if request.client == 1:
            raise ValueError("the letter says: dear Anna")
        return take_turn(self, request, memory)

    monkeypatch.setattr(Client, "take_turn", fail)
    given = {"clients.per_round": 3, "early_stopping.on": False, "rounds": 1}
    house = House(tmp_path, given)
    house.start(0, 1, 2)
    house.serve()
    assert house.seen[0].missing == {1: "its turn failed; its own log says more"}
    assert "dear Anna" not in json.dumps(records(tmp_path / "run"))
    assert "dear Anna" in caplog.text  # in this process, the device's own log


def test_what_is_counted_is_what_is_sent_but_for_a_stated_rest(tmp_path: Path) -> None:
    """Flower adds names, ids and types: at most 1,500 bytes to a message."""
    house = House(tmp_path, {"early_stopping.on": False})
    house.start(0, 1, 2)
    house.serve()
    lines = [line for line in records(tmp_path / "run") if "missing_clients" in line]
    down = sum(line["bytes_initial"] + line["bytes_down"] for line in lines)
    up = sum(line["bytes_up"] for line in lines)
    index = sum(line["index_bytes"] for line in lines)
    trained = [m for m in house.grid.sent if m.metadata.message_type == "train"]
    judged = [m for m in house.grid.sent if "state" in _arrays(m)]
    states = sum(len(_arrays(m)["state"].data) for m in judged)
    messages = len(house.grid.sent)
    assert trained
    assert 0 <= house.grid.bytes_down - down - states <= 1500 * messages + index
    assert 0 <= house.grid.bytes_up - up <= 1500 * messages + index


def _arrays(message: Message) -> Any:
    return message.content.array_records.get("values", {})


def test_plans_of_servers_and_devices_agree(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.start(0, 1, 2)
    server = house.serve()
    own = house.ready.plan
    assert replace(server.plan, build=own.build).neurons == own.neurons
    assert server.plan.capacities == own.capacities


# Privacy ------------------------------------------------------------------------------


def test_noise_on_devices_does_not_follow_the_seed_that_they_know(
    tmp_path: Path,
) -> None:
    given = {
        "rounds": 1,
        "early_stopping.on": False,
        "guard.noise": 0.1,
        "guard.clip": 1.0,
    }
    states = []
    for name in "ab":
        house = House(tmp_path / name, given)
        house.start(0, 1, 2)
        states.append(house.serve().last.federation.global_state)
    alone = simulate({**SETTINGS, **given}).last.federation.global_state
    assert not same_bits(states[0], states[1])
    assert not same_bits(states[0], alone)


def test_with_noise_every_cohort_is_drawn_from_all_devices(tmp_path: Path) -> None:
    given = {
        "rounds": 4,
        "early_stopping.on": False,
        "guard.noise": 0.1,
        "guard.clip": 1.0,
    }
    house = House(tmp_path, given)
    house.start(0, 1, 2)

    def watch(plan: Plan, played: Round) -> None:
        if played.federation.round == 1:
            house.stop(1)
            house.start(1, name="cellar")

    server = house.serve(watch)
    asked = [{*played.answers, *played.missing} for played in house.seen]
    wanted = [choose_clients(Federation(0, {}), server.plan, t) for t in (1, 2, 3, 4)]
    assert asked == [set(cohort) for cohort in wanted]
    assert any(played.missing for played in house.seen)
    assert server.names == list(NAMES)


# Devices with other data, and runs that go on with others -----------------------------


def test_the_usual_shape_of_data_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first device by name has other data; it gets no number."""
    house = House(tmp_path)
    file = tmp_path / "other.npz"
    np.savez(file, x=np.zeros((30, 5), np.float32), y=np.arange(30) % 3)
    house.start(0, data=f"arrays:{file}")
    house.start(1, 2)
    server = house.serve(changes={"deploy.devices": 2})
    assert server.names == ["hall", "kitchen"]
    assert "attic cannot take part: the shape of its examples is (5,)" in caplog.text


def test_a_run_goes_on_with_a_device_more(tmp_path: Path) -> None:
    house = House(tmp_path, {"early_stopping.on": False, "clients.per_round": 3})
    house.start(0, 2)
    two = {"deploy.devices": 2}
    with pytest.raises(PowerCutError):
        house.serve(cut_after(1), two)
    house.start(1)
    with pytest.raises(PowerCutError):
        house.serve(cut_after(2), {"deploy.devices": 3})
    again = house.serve(changes={**two, "rounds": 4})
    assert again.names == ["attic", "kitchen", "hall"]
    assert sorted(house.seen[-1].answers) == [0, 1, 2]
    saved = SavedRun(tmp_path / "run")
    clients: Any = saved.index.settings["clients"]
    assert (clients["number"], saved.index.settings["rounds"]) == (3, 4)
    assert saved.is_finished
    with pytest.raises(SettingsError, match=r"rounds = 2: expected no fewer"):
        house.serve(changes={**two, "rounds": 2})


def test_a_model_keeps_its_outputs_when_a_run_goes_on(tmp_path: Path) -> None:
    """Of all devices, only one has the last class; it is away when the run goes on."""
    house = House(tmp_path, {"early_stopping.on": False})
    needs = []
    for client in range(3):
        config = house.node_config(client)
        x, y = house.share(client)
        keep = y < 10 - client
        file = tmp_path / f"few-{client}.npz"
        np.savez(file, x=x[keep].numpy(), y=y[keep].numpy())
        config["data"] = f"arrays:{file}"
        house.nodes[NAMES[client]] = house.grid.add(config, app)
        needs.append(int(y[keep].max()) + 1)
    given = {"deploy.outputs": 0}
    with pytest.raises(PowerCutError):
        house.serve(cut_after(1), given)
    most = needs.index(max(needs))
    assert sum(need == max(needs) for need in needs) == 1
    house.stop(most)
    server = house.serve(changes={**given, "deploy.devices": 2})
    assert server.last.federation.round == 3


def test_more_devices_may_train_at_once_than_a_run_has_by_default(
    tmp_path: Path,
) -> None:
    house = House(tmp_path, {"rounds": 1, "early_stopping.on": False})
    config = {**house.config, "clients.per_round": 150}
    house.config = house.grid.run_config = config
    house.start(0, 1, 2)
    assert sorted(house.serve().last.federation.last) == [0, 1, 2]


def test_a_simulation_with_too_many_nodes_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(tmp_path)
    numbers = {"clients.number": 3, "clients.capacities": "0.2,0.6,1.0"}
    grid = Nodes({**house.config, **numbers})
    for number in range(4):
        grid.add({"partition-id": number, "num-partitions": 4}, app)
    server = Server(grid, *split(grid.run_config), poll=0.001)
    server.run()
    assert len(server.names) == 3
    assert "give num-supernodes the same number" in caplog.text


def test_a_device_that_is_away_at_the_end_keeps_the_model_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With method.finish every device has a last turn; one of them misses it."""
    given = {"method.name": "fedspu-plus", "early_stopping.on": False}
    house = House(tmp_path, given)
    house.start(0, 1, 2)

    def watch(plan: Plan, played: Round) -> None:
        if played.federation.round == 3:
            house.stop(1)

    last = house.serve(watch).last.federation
    assert last.is_finished
    assert {client: t for client, t in last.last.items() if t == 4} == {0: 4, 2: 4}
    assert "last models: 2 devices" in caplog.text
    assert "without hall (it is not connected)" in caplog.text
