"""Whose request a gateway passes on: what it says is what a server reads, and is believed of operators alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.core.errors import RequestError
from splittime.web.tenants import (
    ALL_ALIKE,
    ANYBODY,
    NOT_BELIEVED,
    TOLD_TENANT,
    Tenant,
    notices_of_head,
    sharer_of,
    told_tenant,
)

OPERATOR = Tenant(name="gateway", is_operator=True, weight=4.0)
ORDINARY = Tenant(name="shop", weight=3.0)


def scope(*values: str) -> dict:
    return {"headers": [(TOLD_TENANT.encode(), value.encode("latin-1")) for value in values]}


@given(st.from_regex(r"[A-Za-z0-9._:-]{1,64}", fullmatch=True), st.floats(0.001, 1e6))
def test_what_a_gateway_says_is_what_a_server_reads(name: str, weight: float) -> None:
    (value,) = told_tenant(Tenant(name=name, weight=weight)).values()
    told = sharer_of(scope(value), OPERATOR)
    assert told.name == f"gateway/{name}"
    assert told.weight == pytest.approx(4.0 * weight, rel=1e-3)
    assert sharer_of(scope(value), ANYBODY).name == name


def test_a_gateway_without_keys_names_nobody() -> None:
    assert told_tenant(ANYBODY) == {}
    assert sharer_of(scope(), OPERATOR) == ("gateway", 4.0)


def test_a_weight_may_be_left_out() -> None:
    assert sharer_of(scope("search"), OPERATOR) == ("gateway/search", 4.0)
    assert sharer_of(scope("search;weight=2.5"), OPERATOR) == ("gateway/search", 10.0)


@pytest.mark.parametrize(
    "values",
    [
        ("",),
        ("a/b",),
        ("a" * 65,),
        ("a b",),
        ("ä",),
        ("a;weight=0",),
        ("a;weight=0.0001",),
        ("a;weight=1000001",),
        ("a;weight=-1",),
        ("a;weight=nan",),
        ("a;weight=1e3",),
        ("a;weight=",),
        ("a;",),
        ("a;weight=1;weight=2",),
        ("a\n",),
        ("a", "a"),
    ],
)
def test_what_names_nobody_is_refused_of_an_operator_and_left_alone_of_others(values: tuple[str, ...]) -> None:
    for who in (OPERATOR, ANYBODY):
        with pytest.raises(RequestError) as caught:
            sharer_of(scope(*values), who)
        assert caught.value.info.param == TOLD_TENANT
        assert len(caught.value.info.value) <= 64
    assert sharer_of(scope(*values), ORDINARY) == ("shop", 3.0)


def test_where_no_key_is_asked_for_all_count_alike_and_a_weight_is_told_so() -> None:
    assert sharer_of(scope("me;weight=1000000"), ANYBODY) == ("me", 1.0)
    assert notices_of_head(scope("me;weight=1000000"), ANYBODY) == [ALL_ALIKE]
    assert notices_of_head(scope("me"), ANYBODY) == notices_of_head(scope(), ANYBODY) == []


def test_another_key_takes_no_share_but_its_own_and_is_told_so() -> None:
    told = scope("search;weight=1000")
    assert sharer_of(told, ORDINARY) == ("shop", 3.0)
    assert notices_of_head(told, ORDINARY) == [NOT_BELIEVED]
    assert notices_of_head(told, OPERATOR) == notices_of_head(scope(), ORDINARY) == []
