"""What who asks for a request's account is told where there is none."""

import pytest

from splittime.api.ledger_answers import account_answer
from splittime.core.errors import NotFound


@pytest.mark.parametrize(("is_open", "why"), [(True, "it runs still"), (False, "it never came, or is kept no more")])
def test_why_a_request_has_no_account_is_said(is_open, why):
    with pytest.raises(NotFound, match=f"^no ended request 'mine': {why}"):
        account_answer([], "mine", is_open=is_open)
