"""Upstreams that come and go while requests wait for them, in a gateway that runs."""

import signal
import threading
import time
import urllib.request

import pytest

from patience import until

from .conftest import DEAD, gateway_of, upstream
from .test_versions import changed


def ask_in_thread(gateway, answers: list, **body) -> threading.Thread:
    asking = threading.Thread(target=lambda: answers.append(gateway.ask("m", **body)))
    asking.start()
    return asking


def write(gateway, folder, text: str) -> None:
    (folder / "gateway.toml").write_text("port = 0\n" + text)
    gateway.process.send_signal(signal.SIGHUP)
    changed(gateway, "applied")


def wait_for_open(gateway, number: int) -> None:
    until(lambda: gateway.get("/stats")["queue"]["requests"] >= number)


def test_requests_wait_for_an_upstream_that_is_not_there_yet(hostile, tmp_path):
    nobody = upstream("nobody", DEAD, "m", max_in_flight=0)
    with gateway_of(tmp_path, nobody + "[queue]\nsign_of_life_s = 0.05\n") as gateway:
        answers: list = []
        asking = [ask_in_thread(gateway, answers), ask_in_thread(gateway, answers, stream=True)]
        wait_for_open(gateway, 2)
        assert gateway.get("/ready") == {"status": "ready"}  # or nobody would ask whom it waits for
        time.sleep(0.2)
        write(gateway, tmp_path, upstream("one", hostile.url("fine"), "m") + "[queue]\nsign_of_life_s = 0.05\n")
        for thread in asking:
            thread.join(20)
        assert [answer[0] for answer in answers] == [200, 200]
        assert any(b": queued" in answer[2] and b"[DONE]" in answer[2] for answer in answers)


def test_who_waits_does_not_get_an_upstream_that_was_taken_out(hostile, tmp_path):
    hostile.hold.clear()
    one = upstream("one", hostile.url("held"), "m", max_in_flight=1)
    with gateway_of(tmp_path, one) as gateway:
        answers: list = []
        asking = [ask_in_thread(gateway, answers) for _ in range(3)]
        wait_for_open(gateway, 2)
        write(gateway, tmp_path, upstream("two", hostile.url("fine"), "m"))
        for _ in range(500):
            if len(answers) == 2:
                break
            time.sleep(0.01)
        assert [answer[1]["x-splittime-upstream"] for answer in answers] == ["two", "two"]
        hostile.hold.set()
        for thread in asking:
            thread.join(20)
        assert [answer[0] for answer in answers] == [200] * 3
        assert answers[2][1]["x-splittime-upstream"] == "one"


@pytest.mark.parametrize(("model", "waits_s", "status"), [("m", (60.0, 50.0), 200), ("other", (5.0, 5.0), 429)])
def test_who_waits_for_a_model_gets_an_upstream_that_has_it_whatever_else_has_changed(
    hostile, tmp_path, model, waits_s, status
):
    nobody = upstream("nobody", DEAD, "m", max_in_flight=0)
    with gateway_of(tmp_path, nobody + f"[queue]\nmax_wait_s = {waits_s[0]}\n") as gateway:
        answers: list = []
        asking = ask_in_thread(gateway, answers)
        wait_for_open(gateway, 1)
        write(gateway, tmp_path, upstream("one", hostile.url("fine"), model) + f"[queue]\nmax_wait_s = {waits_s[1]}\n")
        asking.join(20)
        assert answers[0][0] == status


def test_who_waits_is_counted_though_another_config_has_come(hostile, tmp_path):
    """Whoever scales by what waits must see it."""
    nobody = upstream("nobody", DEAD, "m", max_in_flight=0)
    with gateway_of(tmp_path, nobody) as gateway:
        answers: list = []
        asking = ask_in_thread(gateway, answers)
        wait_for_open(gateway, 1)
        before = gateway.get("/stats")["queue"]
        write(gateway, tmp_path, nobody + "[queue]\nmax_wait_s = 20.0\n")
        assert gateway.get("/stats")["queue"] == before
        with urllib.request.urlopen(gateway.url + "/metrics", timeout=30) as response:
            assert b"splittime_gateway_queued_requests 1" in response.read()
        write(gateway, tmp_path, upstream("one", hostile.url("fine"), "m"))
        asking.join(20)
        assert answers[0][0] == 200
        assert gateway.get("/stats")["queue"] == {"requests": 0, "tokens": 0}


def test_the_series_of_an_upstream_end_with_the_change_behind_the_one_that_took_it_out(hostile, tmp_path):
    with gateway_of(tmp_path, upstream("one", hostile.url("fine"), "m")) as gateway:
        assert gateway.ask("m", stream=True)[0] == 200
        for name, is_told in (("two", True), ("three", False)):
            write(gateway, tmp_path, upstream(name, hostile.url("fine"), "m"))
            answered_by(gateway, name)
            with urllib.request.urlopen(gateway.url + "/metrics", timeout=30) as response:
                assert (b'upstream="one"' in response.read()) == is_told


def answered_by(gateway, name: str) -> None:
    """Asks until the change to this upstream has been made."""
    for _ in range(500):
        if gateway.ask("m")[1]["x-splittime-upstream"] == name:
            return
        time.sleep(0.02)
    raise AssertionError(f"{name} never answered")
