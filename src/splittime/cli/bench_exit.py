"""What every `bench` command exits with: one meaning for each number, chosen in one place.

Scripts read nothing else, so a run that tells nothing must not look like one that went well: one in which no request
was answered is a failure, with or without an SLO, and so is one that Ctrl-C cut short. `exit_code` chooses,
`MEANINGS` says what each means of which command, in its help and in docs/reference.
"""

from splittime.cli.options import INTERRUPTED, NOBODY

DONE, SHORT, UNCLEAR, VOID = 0, 1, 2, 3
LATE = "VOID: the client was late, so the figures are about it"
CUT_SHORT = "Ctrl-C; what was measured until then is kept"
ASKED = {UNCLEAR: "a usage error", VOID: LATE, NOBODY: "no server is there", INTERRUPTED: CUT_SHORT}
MEANINGS = {
    "": {
        DONE: "done; compare: BETTER or EQUIVALENT",
        SHORT: "the SLO is missed, or no answers; compare: WORSE",
        **ASKED,
        UNCLEAR: "a usage error; compare: INCONCLUSIVE",
    },
    "run": {DONE: "done; with --slo: it was kept", SHORT: "the SLO is missed, or nobody was answered", **ASKED},
    "search": {DONE: "the highest rate was found", SHORT: "no rate keeps the SLO, or the server went away", **ASKED},
    "sweep": {
        DONE: "all levels were run; a missed SLO is a result, and no failure",
        SHORT: "at some level nobody was answered",
        **ASKED,
    },
    "compare": {
        DONE: "BETTER or EQUIVALENT; with --slo: B kept it",
        SHORT: "WORSE, or B missed the SLO",
        UNCLEAR: "INCONCLUSIVE (also where a run is VOID), or a usage error",
    },
    "report": {
        DONE: "shown; with --slo: it was kept",
        SHORT: "with --slo: it is missed, or nobody was answered",
        UNCLEAR: "a usage error, or no run in the file",
        VOID: "with --slo: the run is VOID",
    },
    "books": {DONE: "shown", UNCLEAR: "a usage error, no run in the file, or no such request in both books"},
    "mock-server": {UNCLEAR: "a usage error, or the port is taken", INTERRUPTED: "Ctrl-C"},
}


def codes(command: str = "") -> str:
    """Part of a command's help; without a command, of the whole group."""
    return "\b\nExit codes:\n" + "".join(f"  {code:<4} {meaning}\n" for code, meaning in MEANINGS[command].items())


def exit_code(
    *, is_interrupted: bool = False, is_void: bool = False, falls_short: bool = False, is_unclear: bool = False
) -> int:
    """Returns the code of the first that holds, in this order: a void run's figures miss no SLO, an interrupted one's
    keep none."""
    if is_interrupted:
        return INTERRUPTED
    if is_void:
        return VOID
    return SHORT if falls_short else UNCLEAR if is_unclear else DONE
