"""Our books inside vLLM: exact accounts, causes stated by its own scheduler, on its own port.

    engine core     vllm_scheduler     vLLM's scheduler, which says what it decided; it decides nothing else
                    vllm_causes        why a request waits, or has no row
                    engine_books       what that means for each account, each step's record, and all who wait
                    request_book       of one request, and its name there: its id, however long that is
                    mail               carries both to the API process, beside the hot path
    API process     middleware         an ASGI layer around vLLM's application, and what each HTTP request waited for
                    engine_client      what vLLM's own client of its engine is asked, and gives
                    joining            one account from a visit and the engine's book of it, into the ledger
                    routes             /ledger/..., the page
    both            versions           which releases of vLLM are known, and the facts of one
                    vllm_plugin        names the folder of the sockets, in each process of vLLM's

    a start         versions           vLLM's own command with two flags more (`vllm_command` where its package has
                                       another name), for `splittime attach` and the servers of `tune`; ledgers' files
    a ledger        settings           vLLM's knobs, as facts, flags and changes name them
                    simulators         whose scheduler decides when a ledger is run again
                    vllm_offline       vLLM's own scheduler without an engine, under a virtual clock
                    vllm_engine        its loop, and the recorded steps once more

Each process marks its part on the host's monotonic clock, which is one for all of them. Only `vllm_*` modules import
vLLM; `middleware` and `routes` read the objects that it hands them. `tests/attach` runs all of it on
the real one.
"""
