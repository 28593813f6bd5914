"""Verdicts on the paper's claims follow from results that are known."""

from dataclasses import replace
from typing import get_args

import pytest

from fedspu.reproduce.claims import claims_table, gaps_to_best
from fedspu.reproduce.printed import ALPHAS, METHODS, Dataset
from fedspu.reproduce.tables import Result


def result(
    method: str,
    score: float,
    *,
    dataset: Dataset = "cifar10",
    alpha: float = 0.1,
    seed: int = 0,
    stops: bool = False,
    rounds: int = 500,
    seconds: float = 100.0,
    stopped: int = 100,
) -> Result:
    summary = {
        "stopped_clients": stopped if stops else 0,
        "personal_accuracy": score / 100,
        "rounds_played": rounds,
        "train_cpu_seconds": seconds,
    }
    return Result(dataset, method, alpha, seed, stops, 500, summary)


def all_six(
    lead: dict[int, float], *, stops: bool = False, slower: float = 1.0
) -> list[Result]:
    """FedSPU at 60, ahead of Hermes by ``lead`` of each seed, and of others by 20."""
    found = []
    for dataset in get_args(Dataset):
        for alpha in ALPHAS:
            for seed, gap in lead.items():
                for method in METHODS:
                    behind = {"fedspu": 0.0, "hermes": gap}.get(method, 20.0)
                    found.append(
                        result(
                            method,
                            60 - behind,
                            dataset=dataset,
                            alpha=alpha,
                            seed=seed,
                            stops=stops,
                            seconds=100 * (slower if method == "fedspu" else 1),
                        )
                    )
    return found


def verdicts(results: list[Result]) -> list[tuple[str, str]]:
    return [(row[1], row[2]) for row in claims_table(results, "all").rows]


def test_without_results_nothing_is_claimed() -> None:
    assert set(verdicts([])) == {("not played", "-")}


@pytest.mark.parametrize(
    ("lead", "verdict"),
    [
        ({0: 4.4}, "not decided: one seed"),
        ({0: 4.0, 1: 4.5, 2: 4.2}, "confirmed"),
        ({0: 9.0, 1: 9.1, 2: 9.2}, "confirmed"),
        ({0: 1.0, 1: 1.1, 2: 1.2}, "refuted in size: it is ahead, by less"),
        ({0: -1.0, 1: 2.0, 2: 0.1}, "not confirmed: cannot be told from 0"),
        ({0: -1.0, 1: -1.1, 2: -1.2}, "refuted: it is behind"),
    ],
)
def test_the_gain_is_judged_by_its_interval_over_seeds(
    lead: dict[int, float], verdict: str
) -> None:
    ours, found = verdicts(all_six(lead))[0]
    assert found == verdict
    assert "9 of 9 cases, 3 of 3 data sets" in ours


def test_gains_with_early_stopping_are_judged_apart() -> None:
    rows = verdicts(all_six({0: 6.0, 1: 6.1}, stops=True))
    assert rows[0] == ("not played", "-")
    assert rows[1][1] == "confirmed"


def test_the_best_rival_is_the_nearest_and_seeds_are_paired() -> None:
    results = all_six({0: 3.0, 1: 5.0})
    (first, *_) = gaps_to_best(results, False)
    assert first.other == "hermes"
    assert first.by_seed == pytest.approx({0: 3.0, 1: 5.0})
    # A seed that only FedSPU has says nothing about the difference.
    lone = result("fedspu", 99, dataset=first.dataset, alpha=first.alpha, seed=7)
    assert gaps_to_best([*results, lone], False)[0].by_seed.keys() == {0, 1}


def test_rivals_are_compared_on_the_seeds_that_all_of_them_have() -> None:
    # Hermes is the nearest in seed 0, which all have, and far behind in seed 1.
    results = all_six({0: 3.0, 1: 50.0})
    results = [r for r in results if r.method in ("fedspu", "hermes") or r.seed == 0]
    (first, *_) = gaps_to_best(results, False)
    assert first.other == "hermes"
    assert first.by_seed == pytest.approx({0: 3.0, 1: 50.0})


def test_a_case_without_all_rivals_is_not_judged() -> None:
    results = [r for r in all_six({0: 3.0}) if (r.method, r.alpha) != ("fjord", 0.1)]
    assert {gap.alpha for gap in gaps_to_best(results, False)} == {0.5, 1.0}


@pytest.mark.parametrize(
    ("rounds", "ours", "verdict"),
    [
        ((150, 370), "26 to 70 % (2 of 9 cases)", "confirmed"),
        (
            (50, 370),
            "26 to 90 % (2 of 9 cases)",
            "refuted: it saves more in 1 of 2 cases",
        ),
        (
            (50, 450),
            "10 to 90 % (2 of 9 cases)",
            "refuted: it saves more in 1 and less in 1 of 2 cases",
        ),
    ],
)
def test_saved_rounds_are_compared_case_by_case(
    rounds: tuple[int, int], ours: str, verdict: str
) -> None:
    results = [
        result("fedspu", 50, alpha=alpha, stops=True, rounds=t)
        for alpha, t in zip(ALPHAS, rounds, strict=False)
    ]
    assert verdicts(results)[2] == (ours, verdict)


def cut_short(rounds: int, alpha: float) -> Result:
    run = result("fedspu", 50, alpha=alpha, stops=True, rounds=rounds)
    return replace(run, rounds=200)


def test_runs_that_were_cut_short_do_not_say_what_is_saved() -> None:
    ended, cut = cut_short(150, 0.1), cut_short(200, 0.5)
    only = "70 to 70 % (1 of 9 cases)", "confirmed"  # of 500, not of 200
    assert verdicts([ended])[2] == only
    ours, verdict = verdicts([ended, cut])[2]
    assert ours == "70 to 70 % (1 of 9 cases; 1 still played at their limit)"
    others = "that ended; the others save at most 60 % and may be inside"
    assert verdict == f"confirmed in 1 case {others}"
    sooner = cut_short(100, 0.1)
    said = f"refuted: it saves more in 1 of 1 cases {others}"
    assert verdicts([sooner, cut])[2][1] == said
    late = replace(cut_short(450, 0.5), rounds=450)
    assert verdicts([ended, late])[2][1].endswith("the others save at most 10 %")
    none = "1 still played at their limit", "not decided: fewer than 500 rounds"
    assert verdicts([cut])[2] == none


def both_ways(
    prices: dict[int, float], dataset: Dataset = "cifar10", stopped: int = 100
) -> list[Result]:
    """FedSPU with and without early stopping, which costs ``prices`` of each seed."""
    return [
        result(
            "fedspu",
            60 - price * stops,
            dataset=dataset,
            seed=seed,
            stops=stops,
            stopped=stopped,
        )
        for seed, price in prices.items()
        for stops in (False, True)
    ]


@pytest.mark.parametrize(
    ("prices", "ours", "verdict"),
    [
        ({0: 5.0}, "-5.0", "not decided: one seed"),
        ({0: 5.0, 1: 5.1, 2: 4.9}, "-5.0 ± 0.2", "it costs less than printed"),
        ({0: 12.0, 1: 12.1, 2: 11.9}, "-12.0 ± 0.2", "it costs more than printed"),
        ({0: 9, 1: 10, 2: 8}, "-9.0 ± 2.5", "cannot be told from what is printed"),
    ],
)
def test_the_price_of_early_stopping_is_beside_what_is_printed(
    prices: dict[int, float], ours: str, verdict: str
) -> None:
    found = verdicts(both_ways(prices))[3]
    assert found == (f"CIFAR10 {ours} (-9.2); printed in brackets", verdict)


def test_the_price_is_judged_for_each_data_set() -> None:
    several = {0: 5.0, 1: 5.1, 2: 4.9}
    results = [
        *both_ways({0: 1.3}, "emnist"),
        *both_ways(several),
        *both_ways(several, "speech"),
    ]
    assert verdicts(results)[3][1] == (
        "not decided: one seed (EMNIST); it costs less than printed (CIFAR10); "
        "it costs more than printed (Google Speech)"
    )


def test_a_price_is_not_decided_if_no_client_stopped() -> None:
    results = both_ways({0: 0.0, 1: 0.0, 2: 0.1}, stopped=0)
    assert verdicts(results)[3][1] == "not decided: no client stopped"


def test_cases_whose_own_interval_includes_0_are_counted() -> None:
    results = all_six({0: 3.0, 1: 3.1, 2: 3.2})
    assert "told from 0" not in verdicts(results)[0][0]
    worse = {("emnist", 0.5, 0): 60.5, ("emnist", 1.0, 2): 60.2}
    results = [
        result(r.method, worse[case], dataset="emnist", alpha=r.alpha, seed=r.seed)
        if (case := (r.dataset, r.alpha, r.seed)) in worse and r.method == "hermes"
        else r
        for r in results
    ]
    ours = verdicts(results)[0][0]
    assert ours.endswith("3 seeds); by themselves, 2 of the 9 cannot be told from 0")
    # One seed has no interval.
    assert "told from 0" not in verdicts(all_six({0: 0.1}))[0][0]


@pytest.mark.parametrize(
    ("slower", "verdict"),
    [
        (0.9, "confirmed"),
        (1.0, "not decided: within 0.2 of 1.11"),
        (1.3, "not decided: within 0.2 of 1.11"),
        (1.5, "refuted on 3 of 3 data sets"),
    ],
)
def test_time_is_compared_with_the_fastest_rival(slower: float, verdict: str) -> None:
    ours, found = verdicts(all_six({0: 1.0}, slower=slower))[4]
    assert found == verdict
    assert f"CIFAR10 {slower:.2f}" in ours


def test_less_than_a_second_decides_nothing_about_time() -> None:
    results = [
        replace(r, summary={**r.summary, "train_cpu_seconds": seconds})
        for r in all_six({0: 1.0})
        for seconds in [0.13 if r.method == "fedspu" else 0.1]
    ]
    why = "not decided: less than a second of CPU time was measured"
    assert verdicts(results)[4][1] == why
