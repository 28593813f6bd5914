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
) -> Result:
    summary = {
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
        ((50, 370), "26 to 90 % (2 of 9 cases)", "refuted: 1 of 2 cases are outside"),
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
    both = "70 to 70 % (1 of 9 cases; 1 still played at their limit)", "confirmed"
    assert verdicts([ended, cut])[2] == both
    none = "1 still played at their limit", "not decided: fewer than 500 rounds"
    assert verdicts([cut])[2] == none


def test_the_price_of_early_stopping_is_beside_what_is_printed() -> None:
    results = [result("fedspu", 60), result("fedspu", 55, stops=True)]
    ours, verdict = verdicts(results)[3]
    assert ours == "CIFAR10 -5.0 (-9.2); printed in brackets"
    assert verdict == "it costs less"


@pytest.mark.parametrize(
    ("slower", "verdict"),
    [(1.05, "confirmed"), (1.5, "refuted: freezing costs more than dropping")],
)
def test_time_is_compared_with_the_fastest_rival(slower: float, verdict: str) -> None:
    ours, found = verdicts(all_six({0: 1.0}, slower=slower))[4]
    assert found == verdict
    assert f"CIFAR10 {slower:.2f}" in ours
