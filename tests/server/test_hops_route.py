"""`/ledger/hops` of the server: the same as the gateway's, beside requests that name their trace."""

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HOP = {"span_id": SPAN, "name": "ask", "kind": "request", "begin_ns": 0, "duration_ns": 9}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "x"}]}


def test_hops_are_kept_beside_the_requests_of_their_trace(launch) -> None:
    live = launch()
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    status, answered, _ = live.post("/v1/chat/completions", CHAT, headers)
    assert status == 200
    account = live.get(f"/ledger/requests/{answered['x-request-id']}")[2]
    assert (account["trace_id"], account["parent_id"]) == (TRACE, SPAN)
    told = {"trace_id": TRACE, "clock": "c", "hops": [HOP]}
    assert live.post("/ledger/hops", told)[::2] == (200, {"trace_id": TRACE, "kept": 1, "known": 0})
    assert live.get(f"/ledger/hops/{TRACE}")[2]["hops"][0]["name"] == "ask"
    assert live.get(f"/ledger/hops/{'12' * 16}")[0] == 404
    refused = live.post("/v1/chat/completions", {**CHAT, "no_such": 1}, headers)
    assert live.get(f"/ledger/requests/{refused[1]['x-request-id']}")[2]["trace_id"] == TRACE


def test_hops_are_of_the_key_that_posts_them(launch) -> None:
    live = launch(config={"api_key": ("operator", "first", "second")})
    told = {"trace_id": TRACE, "clock": "c", "hops": [HOP]}
    keys = {name: {"authorization": f"Bearer {name}"} for name in ("operator", "first", "second")}
    assert live.post("/ledger/hops", told, keys["first"])[0] == 200
    path = f"/ledger/hops/{TRACE}"
    assert [live.get(path, **keys[name])[0] for name in keys] == [200, 200, 404]
