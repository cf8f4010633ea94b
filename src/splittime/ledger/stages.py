"""The stages of a request's life and the causes of its waits. Each sentence here is printed in the documentation."""

from enum import StrEnum


class Stage(StrEnum):
    """A part of a request's life. An account is always in exactly one."""

    RECEIVE = "receive"
    TOKENIZE_QUEUE = "tokenize_queue"
    TOKENIZE = "tokenize"
    ADMIT = "admit"
    ROUTE = "route"
    CACHE = "cache"
    UPSTREAM = "upstream"
    NETWORK = "network"
    HANDOFF = "handoff"
    QUEUE = "queue"
    PREFILL = "prefill"
    PREFILL_STALL = "prefill_stall"
    DECODE = "decode"
    DECODE_STALL = "decode_stall"
    PREEMPTED = "preempted"
    RECOMPUTE = "recompute"
    DELIVER = "deliver"
    CLIENT_WAIT = "client_wait"
    UNATTRIBUTED = "unattributed"


class Cause(StrEnum):
    """Why a request waits, stated at the moment that it is made to wait."""

    TEXTS_BEFORE = "texts_before"
    WORKER_START = "worker_start"
    BATCH_SLOTS = "batch_slots"
    KV_BLOCKS = "kv_blocks"
    TOKEN_BUDGET = "token_budget"
    POLICY = "policy"
    GRAMMAR = "grammar"
    LORA_SLOTS = "lora_slots"
    KV_EXPORT = "kv_export"
    KV_TRANSFER = "kv_transfer"
    KV_IMPORT = "kv_import"
    ENCODER_BUDGET = "encoder_budget"
    PAUSED = "paused"
    STEP_IN_FLIGHT = "step_in_flight"
    ENGINE_LOOP = "engine_loop"
    MEASURING = "measuring"
    ENGINE_DIED = "engine_died"
    UPSTREAM_SLOTS = "upstream_slots"
    RETRY_PAUSE = "retry_pause"
    SAME_REQUEST = "same_request"
    REPLAY_PACE = "replay_pace"


STAGE_MEANING: dict[Stage, str] = {
    Stage.RECEIVE: "The server reads and checks the request's body.",
    Stage.TOKENIZE_QUEUE: "The prompt waits for a process that renders and tokenises it; the cause says why.",
    Stage.TOKENIZE: "The prompt is rendered (chat template) and turned into token ids.",
    Stage.ADMIT: "The server decides whether there is room for it.",
    Stage.ROUTE: "The gateway decides which upstream gets it, first or after one failed; the cause says why.",
    Stage.CACHE: "The gateway looks for a kept answer, or shares one that is under way; the cause says why it waits.",
    Stage.UPSTREAM: "An upstream of the gateway has it: from the first byte sent to the last byte read.",
    Stage.NETWORK: "What an upstream took by the gateway's clock beyond its own account: the way there and back.",
    Stage.HANDOFF: "On its way from the server process to the engine process.",
    Stage.QUEUE: "The engine has it and no step computes it yet; the cause says why.",
    Stage.PREFILL: "Steps compute its prompt, up to the first token.",
    Stage.PREFILL_STALL: "Its prompt is half computed, and a step went by without a row for it.",
    Stage.DECODE: "Steps compute its next tokens; each step it is in is charged whole.",
    Stage.DECODE_STALL: "It is decoding, and a step went by without a row for it.",
    Stage.PREEMPTED: "Its blocks were taken back; it waits to be admitted again.",
    Stage.RECOMPUTE: "What a preemption threw away, or a late mask of a form made useless, is computed again.",
    Stage.DELIVER: "All tokens are ready; the rest of the answer is on its way to the socket.",
    Stage.CLIENT_WAIT: "All tokens are ready; the client does not read.",
    Stage.UNATTRIBUTED: "Time nobody can explain. Zero, unless the engine died or (vLLM) never told of the request.",
}

CAUSE_MEANING: dict[Cause, str] = {
    Cause.TEXTS_BEFORE: "texts of its size that came before it are rendered and tokenised",
    Cause.WORKER_START: "a process that tokenises is being started",
    Cause.BATCH_SLOTS: "as many requests run as max_num_seqs allows",
    Cause.KV_BLOCKS: "not enough free KV cache blocks",
    Cause.TOKEN_BUDGET: "the step's token budget (max_num_batched_tokens, max_prefill_tokens) is spent",
    Cause.POLICY: "the policy let another request go first",
    Cause.GRAMMAR: "its grammar is still being compiled, or does not say yet which token may come",
    Cause.LORA_SLOTS: "as many adapters are in use as there is room for",
    Cause.KV_EXPORT: "another server was asked for keys and values of its prompt, and has not begun to send any",
    Cause.KV_TRANSFER: "keys and values of its prompt are on their way from elsewhere",
    Cause.KV_IMPORT: "keys and values of its prompt have come from elsewhere, and are checked and taken in",
    Cause.ENCODER_BUDGET: "images or sounds of its prompt have no room in the encoder's budget or cache (vLLM)",
    Cause.PAUSED: "the engine is paused",
    Cause.STEP_IN_FLIGHT: "a step was running that had been planned without it",
    Cause.ENGINE_LOOP: "it arrived between steps: the engine's loop was waking up, taking in others, or telling news",
    Cause.MEASURING: "it arrived while a quiet server measured what its machine can do, a short piece at a time",
    Cause.ENGINE_DIED: "the engine process died",
    Cause.UPSTREAM_SLOTS: "every upstream of its model has as many requests as the gateway gives it (max_in_flight)",
    Cause.RETRY_PAUSE: "an upstream failed, and the next attempt is a random moment away",
    Cause.SAME_REQUEST: "an equal request is under way, and its answer is shared as it comes",
    Cause.REPLAY_PACE: "a kept stream is given again with the gaps that it came with (pace)",
}
