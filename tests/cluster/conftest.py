"""Clients of a cluster that runs."""

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

from benchmarks.cluster.running import MODEL, RunningCluster

FAST = "[serve]\nmax_num_seqs = 4\nkv_cache_memory_bytes = 16777216\nnum_threads = 1\n"


def ask(cluster: RunningCluster, tries: int = 1, **body) -> tuple[int, bytes]:
    """Returns status and body; 0 and the error where there is no answer to the last try."""
    told = {"model": MODEL, "prompt": "def f(", "max_tokens": 4, "temperature": 0, **body}
    asked = urllib.request.Request(cluster.url + "/v1/completions", json.dumps(told).encode())
    asked.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(asked, timeout=150) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except (OSError, http.client.HTTPException) as error:
        return ask(cluster, tries - 1, **body) if tries > 1 else (0, repr(error).encode())


@contextmanager
def asking(cluster: RunningCluster, number: int = 2, **body):
    """So many clients ask again and again, until the block ends; yields the answers."""
    answers, stopping = [], threading.Event()

    def again() -> None:
        while not stopping.is_set():
            answers.append(ask(cluster, **body))
            time.sleep(0.02)

    threads = [threading.Thread(target=again) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
