"""Clients on a Ray cluster: lost actors and nodes, memories, errors, resuming."""

import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

import fedspu
from fedspu.engines import choose
from fedspu.engines.local import LocalEngine
from fedspu.engines.ray.shared_folder import Probe
from fedspu.errors import FedSPUError, MethodError, SettingsError
from fedspu.federation.client_memory import Shelf
from fedspu.federation.plan import Plan
from fedspu.federation.rounds import Round
from fedspu.federation.server import Federation, choose_clients
from fedspu.methods.method import Method
from tests.cli.commands import finished, in_process_of_its_own
from tests.engines.ray_cluster import (
    AllDie,
    Fault,
    HangsOnNode,
    die,
    hang,
    hide_folder,
    wait_for_all,
    wait_until,
    with_fault,
    wrong_kind,
)
from tests.oracles.federation import (
    examples,
    folder_content,
    mlp,
    named,
    plan_for,
    same_bits,
)

SMALL: dict[str, Any] = {"rounds": 3, "train__epochs": 1, "judge__every": 3}


def simulate(method: Method | str = "ditto", **given: Any) -> fedspu.Run:
    settings = {"engine": "ray", "workers": None, **SMALL, **given}
    if isinstance(method, str):
        return fedspu.simulate(
            named(method=method, **settings), model=mlp, data=examples()
        )
    return fedspu.simulate(named(**settings), model=mlp, data=examples(), method=method)


def here(method: str = "ditto", **given: Any) -> fedspu.Run:
    return simulate(method, engine="here", workers=1, **given)


def same_run(found: fedspu.Run, wanted: fedspu.Run) -> bool:
    states = found.last.federation.global_state, wanted.last.federation.global_state
    models = [
        same_bits(
            found.personal_model(k).state_dict(), wanted.personal_model(k).state_dict()
        )
        for k in range(6)
    ]
    return found.rounds == wanted.rounds and same_bits(*states) and all(models)


def chosen(t: int, place: int) -> int:
    plan = plan_for(**SMALL)
    return choose_clients(Federation(t - 1, plan.initial), plan, t)[place]


# What is lost -------------------------------------------------------------------------


@pytest.mark.usefixtures("second_node")
@pytest.mark.filterwarnings("ignore:1 of clients' turns")
def test_a_client_whose_actor_is_lost_is_asked_once_more_by_one_that_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_all(monkeypatch)
    retried, lost = chosen(1, 1), chosen(2, 0)
    method = with_fault(
        "ditto",
        AllDie(1, retried, 2, tmp_path),
        Fault(hang, 2, lost, 1, tmp_path / "hung"),
        Fault(die, 2, lost, 1, tmp_path / "died"),  # first it dies, and then it hangs
    )
    found = simulate(method, clients__deadline=5.0, rounds=2)
    assert (tmp_path / "dead").exists()
    missing = [line["missing_clients"] for line in found.rounds]
    assert missing == [{}, {str(lost): "no answer within 5 s, 2 times"}]
    assert [line["retried_clients"] for line in found.times] == [[retried], []]


@pytest.mark.parametrize(
    "is_shared",
    [False, pytest.param(True, marks=pytest.mark.slow)],
)
def test_a_node_killed_in_mid_round_changes_no_bit(
    is_shared: bool,
    cluster: Any,
    second_node: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not is_shared:
        hide_folder(monkeypatch)
    wait_for_all(monkeypatch)
    begun = tmp_path / "begun"

    def kill() -> None:
        wait_until(begun.exists)
        cluster.remove_node(second_node, allow_graceful=False)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    fault = HangsOnNode(second_node.node_id, 2, begun)
    found = simulate(with_fault("ditto", fault), clients__per_round=5)
    killer.join(timeout=180)
    assert begun.exists()
    assert same_run(found, here(clients__per_round=5))
    assert any(line["retried_clients"] for line in found.times)


# Memories -----------------------------------------------------------------------------


@pytest.mark.usefixtures("cluster")
def test_an_actor_elsewhere_is_sent_what_it_has_not_and_another_engine_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedspu.engines.ray.engine import RayEngine

    hide_folder(monkeypatch)
    sent: list[tuple[int, int]] = []
    pack = RayEngine._packed_memory

    def packed(engine: RayEngine, client: int, t: int) -> Any:
        sent.append((client, t))
        return pack(engine, client, t)

    monkeypatch.setattr(RayEngine, "_packed_memory", packed)

    def stop(plan: Plan, played: Round) -> None:
        if played.federation.round in (1, 3):
            raise KeyboardInterrupt

    # Four of six clients in each round: some take part twice in a row.
    given = {"rounds": 4, "judge__every": 4, "clients__per_round": 4}
    here("apfl", **given, out=str(tmp_path / "whole"))
    path = tmp_path / "part"
    data: Any = {"model": mlp, "data": examples()}
    settings = named(method="apfl", **SMALL | given)
    with pytest.raises(KeyboardInterrupt):
        fedspu.simulate({**settings, "out": str(path)}, **data, watch=stop)
    with pytest.raises(KeyboardInterrupt):
        fedspu.resume(path, **data, watch=stop, engine="ray")
    assert {t for _, t in sent} == {1}  # it made the others itself
    assert len(sent) == len(set(sent))
    assert not list(path.rglob("probe-*"))
    fedspu.resume(path, **data, engine="here")
    assert folder_content(path) == folder_content(tmp_path / "whole")


def test_a_probe_is_answered_by_whoever_sees_the_folder(tmp_path: Path) -> None:
    probe = Probe.ask(Shelf(tmp_path))
    assert probe is not None
    assert probe.is_answered(probe.answer())
    probe.remove()
    assert not list(tmp_path.iterdir())


def test_a_folder_of_the_same_name_is_not_taken_for_it(tmp_path: Path) -> None:
    probe = Probe.ask(Shelf(tmp_path))
    assert probe is not None
    probe.path.write_text("of another machine")
    assert probe.answer() == ""
    assert not probe.is_answered("")


def test_an_answer_that_cannot_be_read_here_is_none(tmp_path: Path) -> None:
    probe = Probe.ask(Shelf(tmp_path))
    assert probe is not None
    answer = probe.answer()
    probe.answer_path.unlink()  # it was written elsewhere
    assert not probe.is_answered(answer)


def test_a_shelf_in_ram_is_seen_by_nobody() -> None:
    assert Probe.ask(Shelf(None)) is None


# Errors -------------------------------------------------------------------------------


@pytest.mark.usefixtures("cluster")
def test_an_error_in_an_actor_is_raised_here() -> None:
    with pytest.raises(MethodError, match="train"):
        simulate(with_fault("fedavg", wrong_kind), workers=1)


def test_without_ray_one_line_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choose, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"needs ray, .*not installed; .*\[ray\]"):
        simulate()


@pytest.fixture
def mute() -> Iterator[str]:
    """An address at which something listens that says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_server_that_is_no_ray_cluster_is_refused_in_time(
    mute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedspu.engines.ray import cluster as ray_cluster

    monkeypatch.setattr(ray_cluster, "HEALTHY", 1.0)
    began = monotonic()
    with pytest.raises(FedSPUError, match=r"no Ray cluster answers there within 1 s"):
        ray_cluster.check_reachable(mute)
    assert monotonic() - began < 10


@pytest.mark.usefixtures("cluster")
def test_a_process_has_one_cluster() -> None:
    with pytest.raises(SettingsError, match=r"is connected to the Ray cluster at"):
        simulate(ray_address="10.0.0.1:6379")


@pytest.mark.usefixtures("cluster")
def test_more_workers_than_cpus_are_remarked_on() -> None:
    from fedspu.engines.ray.cluster import num_actors

    settings = plan_for(workers=99, clients__per_round=6).settings
    with pytest.warns(UserWarning, match=r"workers = 99: the Ray cluster has only"):
        assert num_actors(settings) < 6


# Ending early -------------------------------------------------------------------------


def test_ctrl_c_leaves_a_run_to_resume_and_no_actor(
    cluster: Any, tmp_path: Path
) -> None:
    ray: Any = pytest.importorskip("ray")  # it has no types for what is asked below
    path = str(tmp_path / "run")
    engine = ("--engine", "ray", "--ray-address", cluster.address, "--workers", "1")
    process = in_process_of_its_own(
        "run", "--data", "digits", *engine, "--rounds", "100000", "--out", path
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("round 1/"):
            process.send_signal(signal.SIGINT)
            break
    result = finished(process)
    assert result.code == 130
    assert result.error.startswith("interrupted; rounds up to ")
    total = ray.cluster_resources()["CPU"]
    wait_until(lambda: ray.available_resources().get("CPU") == total)
    assert ray.available_resources()["CPU"] == total


def test_where_nothing_answers_it_is_said_at_once() -> None:
    from fedspu.engines.ray import cluster as ray_cluster

    with pytest.raises(FedSPUError, match=r"nothing answers there \(Connection"):
        ray_cluster.check_reachable("127.0.0.1:1")


def test_the_address_of_a_cluster_is_forgotten_with_its_engine(tmp_path: Path) -> None:
    def stop(plan: Plan, played: Round) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "part"
    data: Any = {"model": mlp, "data": examples()}
    given = {"engine": "ray", "ray_address": "10.0.0.1:6379", "out": str(path)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "_ray_engine", LocalEngine)
        with pytest.raises(KeyboardInterrupt):
            fedspu.simulate({**named(**SMALL), **given}, **data, watch=stop)
    fedspu.resume(path, **data, engine="here")
