"""`POST /v1/prefill`: see docs/guides/prefill.md.

A prefill is a visit like others: it counts to its tenant's limits, has an account of its own, and its client takes it
back by going away. Nobody waits behind it (`scheduler.ahead`), so it has no place in the queue once it is handed off;
that is why a tenant may have few at a time, and why each has a deadline.
"""

from collections.abc import Sequence

from splittime.api.limits import ModelInfo
from splittime.api.params import Ask
from splittime.core.errors import Refused
from splittime.ledger.account import PREFILL
from splittime.scheduler.admission import Place
from splittime.server.group import Group, Writer
from splittime.server.prompts import Prompts, TokenizedPrompt
from splittime.server.service import Service
from splittime.server.visit import Visit
from splittime.web import http


class PrefillVisit(Visit):
    is_counted = False  # among its tenant's

    def _read_head(self) -> ModelInfo:
        model, asked_ns = super()._read_head(), self._deadline_ns
        latest_ns = self.start_ns + int(self.service.config.prefill_ahead_s * 1e9)
        self._deadline_ns = latest_ns if asked_ns is None else min(asked_ns, latest_ns)
        return model

    async def _read_ask(self, model: ModelInfo) -> tuple[Ask, Prompts]:
        try:
            self.service.prefilled.enter(self.tenant.name)
        except Refused as refused:
            raise self.service.admission.refuse(refused) from None
        self.is_counted = True
        return await super()._read_ask(model)

    def _hand_off(
        self, ask: Ask, prompts: Sequence[TokenizedPrompt], model: ModelInfo, place: Place
    ) -> tuple[Group, Writer]:
        handed = super()._hand_off(ask, prompts, model, place)
        place.give_up()
        return handed

    def _leave(self) -> None:
        if self.is_counted:
            self.service.prefilled.leave(self.tenant.name)
        super()._leave()


async def prefill(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Returns when the prompt is computed, or will not be."""
    await PrefillVisit(service, PREFILL, scope, receive, send).serve()
