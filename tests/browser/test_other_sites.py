"""What a page of another site can do to a keyless server on its visitor's machine, in a real browser: nothing."""

import functools
import http.server
import threading
from collections.abc import Callable, Iterator

import pytest

REFUSED = ("403", "CORS", "ERR_FAILED")
TRY = """async (victim) => {
  const told = async (answer) => `${answer.type} ${answer.status} ${await answer.text()}`;
  const ask = (path, options) => fetch(victim + path, options).then(told, (error) => `error ${error.name}`);
  const json = {method: "POST", headers: {"content-type": "application/json"}, body: '{"prompt": "x"}'};
  return [await ask("/ledger/requests"), await ask("/v1/completions", json), await ask("/metrics", {mode: "no-cors"}),
          await ask("/sleep", {method: "POST"}), await ask("/sleep?mode=abort", {method: "POST", mode: "no-cors"})];
}"""


@pytest.fixture
def elsewhere(tmp_path) -> Iterator[int]:
    """The port of another site of this machine, with a page."""
    (tmp_path / "index.html").write_text("<!doctype html><link rel=icon href=data:,><title>evil</title>")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("page_name", "victim_name"),
    [
        ("127.0.0.1", "127.0.0.1"),  # another port: the same site for a browser, another origin
        ("localhost", "localhost"),
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "localhost"),
        ("evil.example", "127.0.0.1"),
    ],
)
def test_a_page_of_another_origin_reads_nothing_and_changes_nothing(
    launch, visit: Callable, elsewhere: int, page_name: str, victim_name: str
) -> None:
    live = launch()
    page = visit(f"http://{page_name}:{elsewhere}/", expected=REFUSED)
    got = page.evaluate(TRY, f"http://{victim_name}:{live.port}")
    assert all(one == "error TypeError" or one == "opaque 0 " for one in got), got
    assert (live.engine.rest.state, live.engine.submitted) == ("awake", [])


def test_a_rebound_name_reads_nothing_and_changes_nothing(launch, visit: Callable) -> None:
    """The page's own name leads to the victim by now, so it is of the same origin for the browser."""
    live = launch()
    page = visit(f"http://evil.example:{live.port}/health", expected=REFUSED)
    got = page.evaluate(TRY, f"http://evil.example:{live.port}")
    assert all(one.startswith("basic 403 ") and "host_not_allowed" in one for one in got), got
    assert (live.engine.rest.state, live.engine.submitted) == ("awake", [])


def test_a_form_of_another_site_changes_nothing(launch, visit: Callable, elsewhere: int) -> None:
    live = launch()
    page = visit(f"http://localhost:{elsewhere}/", expected=(*REFUSED, "favicon.ico"))
    submit = (
        "(to) => { document.body.innerHTML = `<form method=post action='${to}'></form>`; document.forms[0].submit(); }"
    )
    with page.expect_navigation():
        page.evaluate(submit, f"{live.url}/sleep")
    assert "cross_site" in page.content()
    assert live.engine.rest.state == "awake"


def test_a_link_from_another_site_leads_to_the_page(launch, visit: Callable, elsewhere: int) -> None:
    live = launch()
    page = visit(f"http://localhost:{elsewhere}/")
    with page.expect_navigation():
        page.evaluate("(to) => { location.href = to; }", live.url)
    page.get_by_role("heading", name="splittime").wait_for()


def test_a_page_that_is_let_in_can_read_and_ask(launch, visit: Callable, elsewhere: int) -> None:
    live = launch(config={"cors_origins": (f"http://localhost:{elsewhere}",)})
    page = visit(f"http://localhost:{elsewhere}/", expected=("409", "403"))  # asleep already; not asked for by CORS
    got = page.evaluate(TRY, live.url)
    assert [one[:8] for one in got[:2]] == ["cors 200"] * 2
    assert live.engine.rest.state == "asleep"
