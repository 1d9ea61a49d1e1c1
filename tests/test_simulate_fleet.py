"""benchmarks/simulate_fleet.py beside what queueing theory and two H200s say."""

import json
import sys

import numpy as np
import pytest
import simulate_fleet
from simulate_fleet import RESULTS, UTTERANCE_S, Curve, Fleet, arrivals, load, read_curve

TWO_H200S = RESULTS / "nvidia-h200-x2-0bf4757.json"
ONE_THEN = RESULTS / "nvidia-h200-e4ce6c6.json"


@pytest.fixture(scope="module")
def h200() -> Curve:
    return read_curve(ONE_THEN, "0.6b", TWO_H200S)


def test_arrivals_have_the_rate_asked_for(fresh_seed):
    times = arrivals(40, 100_000, np.random.default_rng(fresh_seed))
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 40, rel=0.03) and gaps.std() == pytest.approx(1 / 40, rel=0.03)


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_one_server_with_random_service_is_the_formula_s(share, fresh_seed):
    """M/M/1, shared equally: a call finds as many others, and takes as long, as the formula says."""
    rng, calls = np.random.default_rng(fresh_seed), 200_000
    curve = Curve({1: 1.0}, [])  # a second of audio a second, however many share it
    due = arrivals(share, calls, rng)
    told = Fleet(curve, 1, slots=1000).run(due, rng.exponential(1.0, calls), fresh_seed)
    found = told["streams"] - 1
    assert found.mean() == pytest.approx(share / (1 - share), rel=0.1)
    assert (found == 0).mean() == pytest.approx(1 - share, rel=0.03)
    assert (told["ended"] - due).mean() == pytest.approx(1 / (1 - share), rel=0.1)


def test_open_streams_are_what_the_formula_says_however_long_a_call_is(h200, fresh_seed):
    rng, calls = np.random.default_rng(fresh_seed), 100_000
    for rate in (20, 30):
        due = arrivals(rate, calls, rng)
        told = Fleet(h200, 1).run(due, np.full(calls, UTTERANCE_S), fresh_seed)
        assert (told["streams"] - 1).mean() == pytest.approx(h200.mean_open(rate), rel=0.1)


def test_a_fleet_that_chooses_between_two_is_less_crowded_than_one_that_draws_blindly(h200):
    two, blind = (load(Fleet(h200, 8, choices=choices), 320, UTTERANCE_S, 1) for choices in (2, 1))
    assert two["open"] < 0.9 * blind["open"] and two["p95"] < 0.95 * blind["p95"]


def test_a_proxy_that_prefers_its_own_gpu_does_not_choose(h200):
    alone, together = (load(Fleet(h200, 8, gpus_a_machine=gpus), 320, UTTERANCE_S, 1)["open"] for gpus in (1, 8))
    one = load(Fleet(h200, 1), 40, UTTERANCE_S, 1)["open"]
    assert together < 0.9 * alone and alone == pytest.approx(one, rel=0.1)


def test_the_same_seed_gives_the_same_row(h200):
    rows = [load(Fleet(h200, 2), 60, UTTERANCE_S, seed) for seed in (1, 1, 2)]
    assert rows[0] == rows[1] != rows[2]


def test_who_comes_to_full_slots_waits_and_who_comes_to_a_full_queue_is_refused(h200):
    row = load(Fleet(h200, 1), 120, UTTERANCE_S, 1)
    made = h200.speed(64) / UTTERANCE_S  # calls a second that one H200 ends
    assert row["refused"] == pytest.approx(1 - made / 120, rel=0.1) and row["open"] > 60
    assert row["p50"] == pytest.approx(1000 * simulate_fleet.PROXY_QUEUE / made, rel=0.1)
    assert not load(Fleet(h200, 1), 40, UTTERANCE_S, 1)["refused"]


def test_the_model_is_near_two_h200s(monkeypatch, capsys):
    options = ["--card", str(ONE_THEN), "--check", str(TWO_H200S), "--slots", "64"]
    monkeypatch.setattr(sys, "argv", ["simulate_fleet.py", *options])
    simulate_fleet.main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["check"]
    assert {row["replicas"] for row in rows} == {1, 2}
    for row in rows:
        assert row["ratio"]["p50"] == pytest.approx(1, abs=0.15)
        assert row["ratio"]["p95"] == pytest.approx(1, abs=0.1)


def test_a_fleet_s_largest_rate_keeps_to_the_target(monkeypatch, capsys):
    options = ["--card", str(ONE_THEN), "--replicas-json", str(TWO_H200S), "--slots", "64"]
    options += ["--gpus", "1", "2", "--rates", "20", "--rated", "30"]
    monkeypatch.setattr(sys, "argv", ["simulate_fleet.py", *options])
    simulate_fleet.main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    one, two = told["carried"]
    assert one["rate"] == pytest.approx(30, rel=0.05) and two["rate"] > 2 * one["rate"], "two choose"
    assert told["target_p95_ms"] > told["results"][0]["p95"]


@pytest.mark.parametrize(
    "options, why",
    [
        ("--size 1.7b --card line.json", "is of size 0.6b"),
        ("--card line.json", "lacks the speed of one stream"),
        ("--card missing.json", "is not what measure_load.py or run_all.py wrote"),
    ],
)
def test_what_it_cannot_read_is_told(options, why, tmp_path, monkeypatch):
    told = json.loads(TWO_H200S.read_text())["benchmarks"]["measure_replicas"]["0.6b"]["said"]
    (tmp_path / "line.json").write_text(json.dumps(told))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["simulate_fleet.py", *options.split()])
    with pytest.raises(SystemExit, match=why):
        simulate_fleet.main()
