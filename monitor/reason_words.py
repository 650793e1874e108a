"""States and reasons of requests, releases of blocks and limits of steps, in words. The names are those of the wire."""

from __future__ import annotations

from typing import Final

WORDS: Final = {
    # states of a request
    "RECEIVED": "received",
    "WAITING": "waiting",
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": "waiting for its grammar",
    "WAITING_FOR_REMOTE_KVS": "waiting for remote KV",
    "WAITING_FOR_STREAMING_REQ": "waiting for streamed input",
    "RUNNING": "running",
    "FINISHED_STOPPED": "finished",
    "FINISHED_LENGTH_CAPPED": "finished (length)",
    "FINISHED_ABORTED": "aborted",
    "FINISHED_IGNORED": "ignored",
    "FINISHED_ERROR": "failed",
    "FINISHED_REPETITION": "finished (repetition)",
    # why a request is where it is
    "NEW": "new",
    "KV_BLOCKS": "for KV blocks",
    "MAX_NUM_SEQS": "for a place in the batch",
    "TOKEN_BUDGET": "for token budget",
    "BEHIND_HEAD": "behind the first",
    "PREEMPTED": "preempted",
    "ENCODER": "for the encoder",
    "REMOTE_KV": "for remote KV",
    "GRAMMAR": "for a grammar",
    "STREAMING_INPUT": "for streamed input",
    "PAUSED": "engine paused",
    "ZERO_TOKENS": "scheduled with no token",
    "PREEMPTION_IN_STEP": "preempted in this step",
    "STEP_IN_FLIGHT": "step in flight",
    "UNKNOWN": "reason unknown",
    "LORA": "for a LoRA slot",
    "CONNECTOR": "for the KV connector",
    "CAPACITY": "for capacity",
    "DEFERRED": "deferred",
    "FREE_DEFERRED": "kept for a transfer",
    "UNACCOUNTED": "UNACCOUNTED",
    # why a reference was released
    "FINISHED": "finished",
    "ABORTED": "aborted",
    "OUT_OF_WINDOW": "out of the attention window",
    "ROLLED_BACK": "rolled back",
    "RESET": "reset",
    "TRANSFER_DONE": "after a transfer",
    "LEASE_EXPIRED": "lease expired",
    "ERROR": "error",
    # what kept a step from being larger
    "NONE": "nothing",
    "KV": "KV blocks",
    "TOKENS": "max_num_batched_tokens",
    "SEQUENCES": "max_num_seqs",
}


def in_words(name: str) -> str:
    """Return a name of the wire in plain words, or in lower case if it is not known."""
    return WORDS.get(name, name.lower().replace("_", " "))
