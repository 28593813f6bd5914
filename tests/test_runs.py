import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedspu
from fedspu.errors import FedSPUError, SettingsError, StorageError
from fedspu.federation.client import Client
from fedspu.federation.storage.saved_run import SavedRun
from fedspu.methods import Entry, all_methods
from fedspu.methods.method import ClientRound, Method, Offer
from fedspu.resolve import resolve
from fedspu.settings_text import read_toml
from fedspu.tasks.classification import classification
from fedspu.tasks.task import Metric
from tests.oracles.federation import (
    ConvNet,
    distance,
    examples,
    folder_content,
    mlp,
    named,
    run_for,
    same_bits,
    still_convnet,
)

METHODS = ("fedspu", "local", "fedavg")


def global_of(run: fedspu.Run) -> fedspu.State:
    return run.last.federation.global_state


def own_of(run: fedspu.Run, client: int) -> fedspu.State:
    return dict(run.personal_model(client).state_dict())


# Laws --------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [ConvNet, mlp])
def test_with_all_neurons_active_fedspu_s_global_model_is_fedavg_s(model: Any) -> None:
    full = {"clients__capacities": [1.0], "rounds": 4}
    spu = run_for(model, method="fedspu", **full)
    avg = run_for(model, method="fedavg", **full)
    assert same_bits(global_of(spu), global_of(avg))
    assert not same_bits(global_of(spu), spu.plan.initial)
    assert spu.summary["bytes_down"] == avg.summary["bytes_down"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"train__momentum": 0.9, "train__weight_decay": 0.1},
        {"train__optimizer": "adam"},
        {"train__gradient": "truncated"},
    ],
)
def test_without_a_step_no_learnable_entry_moves(
    method: str, recipe: dict[str, Any]
) -> None:
    run = run_for(method=method, train__lr=0.0, **recipe)
    learnable = dict(ConvNet().named_parameters())
    for state in (global_of(run), own_of(run, 0), own_of(run, 5)):
        for name in learnable:
            assert same_bits({name: state[name]}, {name: run.plan.initial[name]})
    if method != "local":
        assert not same_bits(global_of(run), run.plan.initial)  # statistics do


@pytest.mark.parametrize("method", METHODS)
def test_without_a_step_and_norm_momentum_nothing_moves(method: str) -> None:
    run = run_for(still_convnet, method=method, train__lr=0.0)
    assert same_bits(global_of(run), run.plan.initial)


def test_with_norm_momentum_0_only_entries_that_were_sent_ever_move() -> None:
    run = run_for(still_convnet, rounds=1, clients__capacities=[0.3])
    plan, client = run.plan, run.rounds[0]["clients"][0]
    assert plan.method.offer is not None
    offer = plan.method.offer(plan.client_round(1, client))
    blocks = plan.neurons.blocks(offer.active)
    own = own_of(run, client)
    sent = fedspu.extract(own, blocks)
    assert same_bits(fedspu.merge(plan.initial, blocks, sent) | counts(own), own)


def counts(state: fedspu.State) -> fedspu.State:
    return {name: t for name, t in state.items() if name.endswith("_tracked")}


def test_local_training_leaves_the_global_model_alone_and_sends_nothing() -> None:
    run = run_for(method="local")
    assert same_bits(global_of(run), run.plan.initial)
    assert run.summary["bytes_down"] == run.summary["bytes_up"] == 0


def test_norms_kept_local_stay_at_w0_in_the_global_model_and_train_at_clients() -> None:
    run = run_for(norm__policy="local", clients__per_round=6, rounds=2)
    for name, tensor in run.plan.initial.items():
        if name.startswith("bn"):
            assert torch.equal(global_of(run)[name], tensor)
        elif name.endswith(".weight"):  # a bias before a norm has no gradient
            assert not torch.equal(global_of(run)[name], tensor)
    for client in range(6):
        assert not torch.equal(
            own_of(run, client)["bn1.weight"], run.plan.initial["bn1.weight"]
        )


def test_norms_are_not_kept_local_where_clients_keep_no_model() -> None:
    with pytest.raises(SettingsError, match=r"norm.policy = 'local': .*fedavg keep no"):
        run_for(method="fedavg", norm__policy="local")


# Sameness ----------------------------------------------------------------------------


def in_folder(path: Path, **given: Any) -> fedspu.Run:
    return run_for(out=path, **given)


@pytest.mark.parametrize("given", [{}, {"early_stopping": True}, {"method": "fedavg"}])
def test_one_seed_gives_the_same_bytes(tmp_path: Path, given: dict[str, Any]) -> None:
    for name, seed in (("one", 5), ("two", 5), ("other", 6)):
        in_folder(tmp_path / name, seed=seed, **given)
    one, two, other = (folder_content(tmp_path / n) for n in ("one", "two", "other"))
    assert one == two
    assert {"rounds.jsonl", "clients.jsonl", "checkpoint/initial.safetensors"} <= set(
        one
    )
    for name in ("rounds.jsonl", "clients.jsonl", "checkpoint/initial.safetensors"):
        assert one[name] != other[name]


def test_a_run_in_a_folder_is_the_run_in_memory(tmp_path: Path) -> None:
    memory, folder = run_for(), in_folder(tmp_path / "run")
    assert memory.rounds == folder.rounds
    assert same_bits(global_of(memory), global_of(folder))
    for client in range(6):
        assert same_bits(own_of(memory, client), own_of(folder, client))
    assert lines_of(tmp_path / "run/rounds.jsonl") == memory.rounds


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def generators() -> list[Any]:
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        [str(part) for part in np.random.get_state()],  # noqa: NPY002  # the global one
    ]


def test_no_global_generator_is_moved(tmp_path: Path) -> None:
    before = generators()
    run = in_folder(tmp_path / "run", early_stopping=True)
    assert generators() == before
    run.personal_model(0)
    run.global_model()
    fedspu.load_personal(tmp_path / "run", 0, ConvNet)
    assert generators() == before


def test_no_global_generator_is_read() -> None:
    def build() -> nn.Module:
        return nn.Sequential(ConvNet(), nn.Dropout(0.3))

    states = []
    with torch.random.fork_rng():
        for seed in (1, 2):
            torch.manual_seed(seed)
            random.seed(seed)
            states.append(global_of(run_for(build)))
    assert same_bits(*states)


def test_the_number_of_threads_is_left_as_it_was() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        seen: list[int] = []
        fedspu.simulate(
            named(rounds=1),
            model=mlp,
            data=examples(),
            watch=lambda plan, report: seen.append(torch.get_num_threads()),
        )
        assert seen == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# Going on ----------------------------------------------------------------------------


def interrupt_after(k: int) -> Any:
    def watch(plan: Any, report: Any) -> None:
        if report.federation.round == k:
            raise KeyboardInterrupt

    return watch


@pytest.mark.parametrize(
    "given",
    [
        {"method": "fedspu"},
        {"method": "fedspu", "early_stopping": True, "rounds": 6},
        {"method": "local", "early_stopping": True},
        {"method": "fedavg"},
        {"method": "fedspu", "norm__policy": "local", "judge__clients": 3},
    ],
)
def test_a_run_that_was_interrupted_goes_on_to_the_same_bytes(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    given = {"rounds": 4, **given}
    whole = in_folder(tmp_path / "whole", **given)
    path = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        fedspu.simulate(
            named(out=path, **given),
            model=ConvNet,
            data=examples(),
            watch=interrupt_after(1),
        )
    assert not (path / "summary.json").exists()
    with pytest.raises(KeyboardInterrupt):
        fedspu.resume(path, model=ConvNet, data=examples(), watch=interrupt_after(3))
    run = fedspu.resume(path, model=ConvNet, data=examples())

    assert folder_content(path) == folder_content(tmp_path / "whole")
    assert run.rounds == whole.rounds
    assert untimed(run.summary) == untimed(whole.summary)
    assert untimed(json.loads((path / "summary.json").read_text())) == untimed(
        whole.summary
    )
    for client in range(6):
        assert same_bits(own_of(run, client), own_of(whole, client))


def untimed(summary: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in summary.items()
        if not name.endswith("_seconds") and name != "peak_rss_bytes"
    }


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    run = in_folder(tmp_path / "run")
    before = folder_content(tmp_path / "run")
    again = fedspu.resume(tmp_path / "run", model=ConvNet, data=examples())
    assert folder_content(tmp_path / "run") == before
    assert untimed(again.summary) == untimed(run.summary)
    assert again.summary["train_seconds"] == run.summary["train_seconds"]


def test_a_folder_may_be_moved_before_it_is_resumed(tmp_path: Path) -> None:
    in_folder(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fedspu.simulate(
            named(out=tmp_path / "old"),
            model=ConvNet,
            data=examples(),
            watch=interrupt_after(1),
        )
    (tmp_path / "old").rename(tmp_path / "new")
    fedspu.resume(tmp_path / "new", model=ConvNet, data=examples())
    assert folder_content(tmp_path / "new") == folder_content(tmp_path / "whole")
    assert not (tmp_path / "old").exists()


def test_an_interrupted_turn_loses_that_round_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_folder(tmp_path / "whole")
    path, turns = tmp_path / "run", iter(range(100))
    original = Client.take_turn

    def interrupted(*args: Any) -> Any:
        if next(turns) == 7:  # the second turn of round 3
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Client, "take_turn", interrupted)
        with pytest.raises(KeyboardInterrupt):
            in_folder(path)
    assert SavedRun(path).checkpoint().federation.round == 2
    fedspu.resume(path, model=ConvNet, data=examples())
    assert folder_content(path) == folder_content(tmp_path / "whole")


# Judging -----------------------------------------------------------------------------


def accuracy(
    run: fedspu.Run, model: nn.Module, client: int, part: str = "test"
) -> float:
    x, y = run.examples.part(client, part)
    with torch.no_grad():
        right: list[bool] = (model(x).argmax(1) == y).tolist()
    return sum(right) / len(right)


@pytest.mark.parametrize("method", METHODS)
def test_the_summary_s_accuracies_are_those_found_by_hand(method: str) -> None:
    run = run_for(method=method, rounds=3, clients__per_round=2, train__epochs=6)
    own, val = (
        {k: accuracy(run, run.personal_model(k), k, part) for k in range(6)}
        for part in ("test", "val")
    )
    asked = {k for line in run.rounds for k in line["clients"]}
    summary = run.summary
    for found, name in ((own, "accuracy"), (val, "val_accuracy")):
        assert summary[f"personal_{name}"] == pytest.approx(mean(found.values()))
        assert summary[f"participating_{name}"] == pytest.approx(
            mean(found[k] for k in asked)
        )
    assert summary["worst_tenth_accuracy"] == pytest.approx(min(own.values()))
    assert summary["participating_clients"] == len(asked) < 6
    by_capacity = {
        p: mean([own[2 * i], own[2 * i + 1]])
        for i, p in enumerate(("0.3", "0.5", "1.0"))
    }
    assert summary["personal_accuracy_by_capacity"] == pytest.approx(by_capacity)
    if method == "local":
        assert summary["global_accuracy"] is summary["global_val_accuracy"] is None
    else:
        for part, name in (("test", "accuracy"), ("val", "val_accuracy")):
            of_all = mean(accuracy(run, run.global_model(), k, part) for k in range(6))
            assert summary[f"global_{name}"] == pytest.approx(of_all)
    assert len(set(own.values())) > 1  # else this shows nothing
    assert own != val


def mean(values: Any) -> float:
    listed = list(values)
    return float(sum(listed) / len(listed))


def test_each_turn_s_accuracy_is_recorded_as_judged_after_it(tmp_path: Path) -> None:
    run = in_folder(tmp_path / "run", rounds=1, train__epochs=6)
    for line in lines_of(tmp_path / "run/clients.jsonl"):
        client = line["client"]
        for part, name in (("test", "accuracy"), ("val", "val_accuracy")):
            found = accuracy(run, run.personal_model(client), client, part)
            assert line[name] == pytest.approx(found)


@pytest.mark.parametrize("method", METHODS)
def test_a_saved_personal_model_is_the_run_s(tmp_path: Path, method: str) -> None:
    run = in_folder(tmp_path / "run", method=method, clients__per_round=2, rounds=2)
    for client in range(6):
        model = fedspu.load_personal(tmp_path / "run", client, ConvNet)
        assert same_bits(dict(model.state_dict()), own_of(run, client))
        assert not model.training


@pytest.mark.parametrize("method", ["fedspu", "heterofl", "fedavg"])
def test_a_saved_global_model_is_the_run_s(tmp_path: Path, method: str) -> None:
    run = in_folder(tmp_path / "run", method=method, rounds=2)
    model = fedspu.load_global(tmp_path / "run", ConvNet, examples(), client=3)
    wanted = run.global_model(3)
    assert same_bits(dict(model.state_dict()), dict(wanted.state_dict()))
    assert not model.training


def test_a_run_without_a_global_model_says_so(tmp_path: Path) -> None:
    in_folder(tmp_path / "run", method="local", rounds=1)
    with pytest.raises(SettingsError, match=r"no server's model.*load_personal"):
        fedspu.load_global(tmp_path / "run", ConvNet)


def test_a_personal_model_of_an_interrupted_run_can_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fedspu.simulate(
            named(out=tmp_path / "run"),
            model=ConvNet,
            data=examples(),
            watch=interrupt_after(1),
        )
    fedspu.load_personal(tmp_path / "run", 0, ConvNet)


def test_a_built_in_model_is_found_by_its_name(tmp_path: Path) -> None:
    run = fedspu.simulate(
        {"rounds": 1, "clients.per_round": 2, "out": tmp_path / "run"}
    )
    client = run.rounds[0]["clients"][0]
    model = fedspu.load_personal(tmp_path / "run", client)
    assert same_bits(dict(model.state_dict()), own_of(run, client))


@pytest.mark.parametrize("client", [-1, 6, 100])
def test_a_client_that_is_not_there_is_refused(tmp_path: Path, client: int) -> None:
    run = in_folder(tmp_path / "run", rounds=1)
    with pytest.raises(SettingsError, match=f"client = {client}: expected 0 to 5"):
        run.personal_model(client)
    with pytest.raises(SettingsError, match=f"client = {client}: expected 0 to 5"):
        fedspu.load_personal(tmp_path / "run", client, ConvNet)


def test_a_model_that_does_not_fit_a_saved_one_is_refused(tmp_path: Path) -> None:
    in_folder(tmp_path / "run", rounds=1)
    with pytest.raises(FedSPUError):
        fedspu.load_personal(tmp_path / "run", 0, mlp)
    with pytest.raises(StorageError, match="not a run folder"):
        fedspu.load_personal(tmp_path, 0, ConvNet)


def test_the_global_model_is_recorded_when_judged_and_at_the_end() -> None:
    run = run_for(rounds=5, judge__every=2)
    judged = [line["global_accuracy"] is not None for line in run.rounds]
    assert judged == [False, True, False, True, True]
    for name in ("global_accuracy", "global_val_accuracy"):
        assert [line[name] is not None for line in run.rounds] == judged
        assert run.summary[name] == run.rounds[-1][name]


# Records -----------------------------------------------------------------------------

DUE = """
    method dataset alpha seed rounds_played stopped_clients personal_accuracy
    personal_accuracy_by_capacity participating_accuracy global_accuracy bytes_initial
    bytes_down bytes_up index_bytes train_seconds critical_seconds wall_seconds
    train_cpu_seconds peak_rss_bytes personal_val_accuracy participating_val_accuracy
    global_val_accuracy worst_tenth_accuracy
"""


@pytest.mark.parametrize("given", [{}, {"method": "local"}, {"early_stopping": True}])
def test_the_summary_has_what_is_due_and_adds_up(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    run = in_folder(tmp_path / "run", rounds=5, **given)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary == run.summary
    assert set(DUE.split()) <= set(summary)

    rounds, clients, times = (
        lines_of(tmp_path / f"run/{name}.jsonl")
        for name in ("rounds", "clients", "times")
    )
    assert [line["round"] for line in rounds] == [*range(1, len(rounds) + 1)]
    assert summary["rounds_played"] == len(rounds) == len(times)
    assert summary["stopped_clients"] == rounds[-1]["stopped_clients"]
    assert summary["stopped_clients"] == sum(line["has_stopped"] for line in clients)
    for name in ("bytes_initial", "bytes_down", "bytes_up", "index_bytes"):
        assert summary[name] == sum(line[name] for line in rounds)
        for line in rounds:
            turns = [c for c in clients if c["round"] == line["round"]]
            assert line[name] == sum(turn[name] for turn in turns)
            assert line["clients"] == [turn["client"] for turn in turns]
            assert line["train_loss"] == pytest.approx(
                mean(turn["train_loss"] for turn in turns)
            )
    for name in (
        *("train_seconds", "train_cpu_seconds"),
        *("critical_seconds", "wall_seconds"),
    ):
        assert summary[name] == pytest.approx(sum(line[name] for line in times))
    for line in times:
        assert line["train_cpu_seconds"] > 0
        assert 0 < line["critical_seconds"] <= line["train_seconds"]
        assert line["train_seconds"] <= line["wall_seconds"]
    for line in clients:
        assert (line["val_loss"] is not None) == ("early_stopping" in given)
        split = run.examples.splits[line["client"]]
        assert line["num_examples"] == len(split.train)
    assert (summary["method"], summary["dataset"]) == (run.plan.method.name, "arrays")
    assert (summary["alpha"], summary["seed"]) == (1.0, 0)
    assert summary["peak_rss_bytes"] > 10**7


def test_what_depends_on_the_clock_is_in_the_times_alone(tmp_path: Path) -> None:
    in_folder(tmp_path / "run", rounds=1)
    for name in ("rounds.jsonl", "clients.jsonl"):
        assert "seconds" not in (tmp_path / "run" / name).read_text()


# Settings of a run -------------------------------------------------------------------


def test_the_settings_in_a_folder_give_the_same_run(tmp_path: Path) -> None:
    in_folder(tmp_path / "one", seed=3, early_stopping=True, judge__clients=4)
    given = {**read_toml(tmp_path / "one/settings.toml"), "out": tmp_path / "two"}
    fedspu.simulate(given, model=ConvNet, data=examples())
    assert folder_content(tmp_path / "one") == folder_content(tmp_path / "two")
    one, two = (read_toml(tmp_path / n / "settings.toml") for n in ("one", "two"))
    assert {**one, "out": ""} == {**two, "out": ""}


def test_settings_as_an_object_give_the_same_run() -> None:
    run = run_for()
    again = fedspu.simulate(run.plan.settings, model=ConvNet, data=examples())
    assert again.rounds == run.rounds
    made = resolve({**named(), "model": "x"}, {"model"})
    assert fedspu.simulate(made, model=ConvNet, data=examples()).rounds == run.rounds


def test_nested_settings_are_the_dotted_ones() -> None:
    nested = {
        "rounds": 2,
        "method": {"name": "fedavg"},
        "clients": {"number": 6, "per_round": 2},
        "train": {"epochs": 1, "lr": 0.1, "batch_size": 8},
    }
    flat = {
        "rounds": 2,
        "method": "fedavg",
        "clients.number": 6,
        "clients.per_round": 2,
        "train.epochs": 1,
        "train.lr": 0.1,
        "train.batch_size": 8,
    }
    one = fedspu.simulate(nested, model=mlp, data=examples())
    two = fedspu.simulate(flat, model=mlp, data=examples())
    assert one.plan.settings == two.plan.settings
    assert one.rounds == two.rounds


def test_tensors_arrays_and_lists_are_the_same_data() -> None:
    x, y = examples()
    given = named(rounds=1)
    runs = [
        fedspu.simulate(given, model=mlp, data=data)
        for data in ((x, y), (torch.from_numpy(x), torch.from_numpy(y)), (x, list(y)))
    ]
    assert runs[0].rounds == runs[1].rounds == runs[2].rounds


def test_a_run_that_fails_before_its_first_round_leaves_no_folder(
    tmp_path: Path,
) -> None:
    """What the message advises, a lower train.lr, then works with the same --out."""
    with pytest.raises(FedSPUError, match=r"lower train\.lr"):
        run_for(mlp, out=tmp_path / "run", train__lr=1e30)
    assert not (tmp_path / "run").exists()


def test_a_run_that_fails_later_can_be_looked_at_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, turns = Client.take_turn, iter(range(100))

    def fails(*args: Any) -> Any:
        if next(turns) >= 3:  # all of the second round
            raise fedspu.errors.TrainingError("the training loss is nan")
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Client, "take_turn", fails)
        with pytest.raises(FedSPUError):
            in_folder(tmp_path / "run")
    assert SavedRun(tmp_path / "run").checkpoint().federation.round == 1
    fedspu.resume(tmp_path / "run", model=ConvNet, data=examples())
    in_folder(tmp_path / "whole")
    assert folder_content(tmp_path / "run") == folder_content(tmp_path / "whole")


def test_personal_training_helps() -> None:
    """Not a law: trained clients do better than w0 on this easy data."""
    run = run_for(rounds=4, clients__per_round=6, train__epochs=5, train__lr=0.05)
    assert run.summary["personal_accuracy"] > 0.7
    assert distance(global_of(run), run.plan.initial) > 0.01


def test_other_data_than_the_run_s_is_refused(tmp_path: Path) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    x, y = examples()
    settings = {"out": str(tmp_path / "run"), "rounds": 3, "clients.number": 6}
    given = {**settings, "clients.per_round": 3, "train.batch_size": 8}
    with pytest.raises(KeyboardInterrupt):
        fedspu.simulate(given, model=mlp, data=(x, y), watch=interrupt)
    with pytest.raises(fedspu.FedSPUError, match="started with other data"):
        fedspu.resume(tmp_path / "run", model=mlp, data=(x, y[::-1].copy()))
    fedspu.resume(tmp_path / "run", model=mlp, data=(x, y))


# Given in Python ---------------------------------------------------------------------


def few_offered(now: ClientRound) -> Offer:
    """The first neuron of every group."""
    return Offer({group.name: torch.arange(1) for group in now.neurons.groups})


OWN_METHOD = Method(
    name="firsts",
    reference="nobody",
    in_words=("the first neuron", "it", "a full model of its own", "its own model"),
    judged_by="own",
    offer=few_offered,
)


def squared(output: Tensor, target: Tensor, /, *, reduction: str = "mean") -> Tensor:
    wanted = nn.functional.one_hot(target, output.shape[1]).to(output.dtype)
    return nn.functional.mse_loss(output, wanted, reduction=reduction)


def sums(output: Tensor, target: Tensor) -> Tensor:
    wrong = (output.argmax(1) != target).sum()
    return torch.tensor([float(wrong), float(len(target))], dtype=torch.float64)


OWN_TASK = replace(
    classification,
    name="marks",
    loss=squared,
    metric=Metric("errors", sums, lambda s: float(s[0] / s[1]), is_higher_better=False),
)


def own_run(watch: Any = None, **given: Any) -> fedspu.Run:
    return fedspu.simulate(
        named(**given),
        model=ConvNet,
        data=examples(),
        method=OWN_METHOD,
        task=OWN_TASK,
        watch=watch,
    )


def test_a_method_and_a_task_may_be_given_in_python() -> None:
    run = own_run()
    assert run.plan.method is OWN_METHOD
    assert run.plan.task is OWN_TASK
    assert (run.summary["method"], run.summary["task"]) == ("firsts", "marks")
    wrong, val = (
        [1 - accuracy(run, run.personal_model(k), k, part) for k in range(6)]
        for part in ("test", "val")
    )
    assert run.summary["personal_errors"] == pytest.approx(mean(wrong))
    assert run.summary["personal_val_errors"] == pytest.approx(mean(val))
    # The fewer the better, so the most is the worst.
    assert run.summary["worst_tenth_errors"] == pytest.approx(max(wrong))
    assert max(wrong) > min(wrong)
    for name in ("conv1.weight", "bn1.running_mean"):  # of the rest nothing was sent
        moved = global_of(run)[name] != run.plan.initial[name]
        assert bool(moved[0].any())
        assert not bool(moved[1:].any())
    usual = fedspu.simulate(named(), model=ConvNet, data=examples(), method=OWN_METHOD)
    assert not same_bits(global_of(run), global_of(usual))  # the loss is another


def test_what_was_given_in_python_goes_before_what_the_settings_name() -> None:
    run = own_run(method="fedavg", task="regression")
    assert run.plan.method is OWN_METHOD
    assert run.rounds == own_run().rounds


def test_a_run_with_a_method_and_task_of_one_s_own_goes_on_to_the_same_bytes(
    tmp_path: Path,
) -> None:
    whole = own_run(out=tmp_path / "whole")
    path = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        own_run(interrupt_after(1), out=path)
    run = fedspu.resume(
        path, model=ConvNet, data=examples(), method=OWN_METHOD, task=OWN_TASK
    )
    assert folder_content(path) == folder_content(tmp_path / "whole")
    assert run.rounds == whole.rounds
    assert untimed(run.summary) == untimed(whole.summary)


@pytest.mark.parametrize(
    ("again", "says"),
    [
        ({"task": OWN_TASK}, "method = 'firsts'"),
        ({"method": OWN_METHOD}, "task = 'marks'"),
    ],
)
def test_what_was_given_in_python_is_asked_for_again(
    tmp_path: Path, again: dict[str, Any], says: str
) -> None:
    own_run(out=tmp_path / "run", rounds=1)
    before = folder_content(tmp_path / "run")
    with pytest.raises(SettingsError, match=says):
        fedspu.resume(tmp_path / "run", model=ConvNet, data=examples(), **again)
    with pytest.raises(SettingsError, match=says):
        fedspu.load_personal(tmp_path / "run", 0, ConvNet, examples(), **again)
    assert folder_content(tmp_path / "run") == before


def test_a_personal_model_of_one_s_own_method_and_task_can_be_loaded(
    tmp_path: Path,
) -> None:
    run = own_run(out=tmp_path / "run")
    for client in range(6):
        model = fedspu.load_personal(
            tmp_path / "run", client, ConvNet, method=OWN_METHOD, task=OWN_TASK
        )
        assert same_bits(dict(model.state_dict()), own_of(run, client))


# Models without data -----------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> str:
    """The name of made examples in a file."""
    x, y = examples()
    np.savez(tmp_path / "f.npz", x=x, y=y)
    return f"arrays:{tmp_path / 'f.npz'}"


READY_AT_ONCE = [e for e, method in all_methods().items() if method.ready is None]


def named_method(entry: Entry) -> dict[str, Any]:
    return {"method__name": entry.name, "method__reading": entry.reading}


@pytest.mark.parametrize("entry", READY_AT_ONCE, ids=lambda e: f"{e.name} {e.reading}")
@pytest.mark.parametrize("is_in_file", [False, True])
def test_a_model_that_is_ready_at_once_is_loaded_without_data(
    tmp_path: Path, entry: Entry, file: str, is_in_file: bool
) -> None:
    given = named(out=tmp_path / "run", rounds=2, **named_method(entry))
    data: Any = examples()
    if is_in_file:
        given["data.name"], data = file, None
    run = fedspu.simulate(given, model=mlp, data=data)
    (tmp_path / "f.npz").unlink()  # who loads a model may be elsewhere
    asked = {k for line in run.rounds for k in line["clients"]}
    never = set(range(6)) - asked
    for client in (min(asked), *sorted(never)[:1]):
        model = fedspu.load_personal(tmp_path / "run", client, mlp)
        assert same_bits(dict(model.state_dict()), own_of(run, client))
        assert not model.training


def test_most_methods_have_models_that_are_ready_at_once() -> None:
    others = {entry.name for entry in all_methods()} - {e.name for e in READY_AT_ONCE}
    assert others == {"heterofl"}


@pytest.mark.parametrize(
    "given",
    [
        {"method__name": "heterofl"},
        {"method__name": "fedavg", "method__finetune": 1},
    ],
)
def test_a_model_that_takes_examples_to_be_ready_asks_for_them(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    run = in_folder(tmp_path / "run", rounds=2, **given)
    with pytest.raises(SettingsError, match=r"data=\(x, y\)"):
        fedspu.load_personal(tmp_path / "run", 0, ConvNet)
    for client in range(6):
        model = fedspu.load_personal(tmp_path / "run", client, ConvNet, examples())
        assert same_bits(dict(model.state_dict()), own_of(run, client))


# What is said ------------------------------------------------------------------------


def test_a_run_is_shown_in_a_few_words() -> None:
    shown = [
        (run_for(rounds=2), "fedspu", "personal accuracy"),
        (own_run(rounds=2), "firsts", "personal errors"),
    ]
    for run, method, metric in shown:
        for words in (method, "on arrays, round 2", metric):
            assert words in repr(run)
        assert len(repr(run)) < 88
        assert "\n" not in repr(run)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"train.lrr": 0.1}, r"train\.lrr: no such setting .*did you mean train\.lr"),
        ({"train.lr": -1}, r"train\.lr = -1: expected"),
        ({"rounds": "many"}, "rounds = 'many': expected"),
        ({"method": "fedspoo"}, r"method = 'fedspoo'.*did you mean fedspu"),
        ({"method.finetune": 3}, r"method\.finetune = 3: fedspu \(paper\) has no such"),
        ({"method.reading": "original"}, r"method\.reading = 'original': fedspu has"),
        ({"model": "emnits"}, r"model = 'emnits'.*did you mean emnist"),
        ({"task": "sorting"}, "task = 'sorting': expected one of"),
        ({"data.partition": "evenly"}, r"data\.partition = 'evenly': expected one of"),
        ({"device": "nowhere"}, "device = 'nowhere'"),
        (
            {"method": "fedavg", "norm.policy": "local"},
            r"norm\.policy = 'local': clients of fedavg",
        ),
        (
            {"method": "heterofl", "task": "regression"},
            r"task = 'regression': heterofl \(original\) learns only classification",
        ),
        (
            {"task": "regression", "train.class_weights": "balanced"},
            r"train\.class_weights = 'balanced': the task regression has no classes",
        ),
    ],
)
def test_a_wrong_setting_is_reported_before_data_files_are_opened(
    tmp_path: Path, given: dict[str, Any], says: str
) -> None:
    nowhere = {"data.name": "emnist", "data.dir": tmp_path / "nowhere"}
    with pytest.raises(FedSPUError, match=says):
        fedspu.simulate({**nowhere, **given, "out": tmp_path / "run"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("seed = 0", "seed = 7"), r"says seed = 7, but the run began with 0"),
        (
            ("lr = 0.1", "lr = 0.5"),
            r"says train\.lr = 0\.5, but the run began with 0\.1",
        ),
        (("rounds = 3", ""), r"says rounds = None, but the run began with 3"),
        (
            ("kernels = ", "saves = 'lean'\nkernels = "),
            r"not valid TOML|says train\.saves",
        ),
    ],
)
def test_edited_settings_are_refused_by_name(
    edit: tuple[str, str], message: str, tmp_path: Path
) -> None:
    run_for(out=str(tmp_path / "run"), seed=0, train__lr=0.1, rounds=3)
    file = tmp_path / "run" / "settings.toml"
    text = file.read_text()
    assert edit[0] in text
    file.write_text(text.replace(*edit))
    with pytest.raises(FedSPUError, match=message):
        fedspu.resume(tmp_path / "run", model=ConvNet, data=examples())
    with pytest.raises(FedSPUError, match=message):
        fedspu.load_personal(tmp_path / "run", 0, ConvNet, examples())


def test_settings_that_change_no_bit_may_be_edited(tmp_path: Path) -> None:
    run_for(out=str(tmp_path / "run"), workers=1)
    file = tmp_path / "run" / "settings.toml"
    file.write_text(file.read_text().replace("workers = 1", "workers = 2"))
    fedspu.resume(tmp_path / "run", model=ConvNet, data=examples())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (('engine = "here"', 'engine = "hdre"'), "engine = 'hdre': expected 'here'"),
        (("workers = 1", "workers = -1"), "workers = -1: expected"),
        (("workers = 1", 'workers = "two"'), "workers = 'two': expected"),
    ],
)
def test_but_not_to_what_they_cannot_be(
    edit: tuple[str, str], message: str, tmp_path: Path
) -> None:
    run_for(out=str(tmp_path / "run"), workers=1)
    file = tmp_path / "run" / "settings.toml"
    text = file.read_text()
    assert edit[0] in text
    file.write_text(text.replace(*edit))
    says = f"^{re.escape(str(file))}: {message}.*; delete it to go on"
    with pytest.raises(StorageError, match=says):
        fedspu.resume(tmp_path / "run", model=ConvNet, data=examples())
    with pytest.raises(StorageError, match=says):
        fedspu.load_personal(tmp_path / "run", 0, ConvNet, examples())
    file.unlink()
    with pytest.warns(UserWarning, match="is missing; using a copy"):
        fedspu.resume(tmp_path / "run", model=ConvNet, data=examples())
