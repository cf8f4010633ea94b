"""Our books inside vLLM: exact accounts, causes stated by its own scheduler, on its own port.

    engine core     vllm_scheduler     vLLM's scheduler, which says what it decided; it decides nothing else
                    engine_books       what that means for each request's account and each step's record
                    mail               carries both to the API process, beside the hot path
    API process     visits             an ASGI layer: the edges of each HTTP request
                    joining            one account from a visit and the engine's book of it, into the ledger
                    routes             /ledger/..., the page
    both            versions           which releases of vLLM are known

Each process marks its part on the host's monotonic clock, which is one for all of them. Only `vllm_*` modules look into
vLLM, and `tests/attach` runs each of them on the real one.
"""
