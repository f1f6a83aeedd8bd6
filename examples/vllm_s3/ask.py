"""Wait until a server answers, and ask it to complete a text: python ask.py http://host:port MODEL TEXT"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from typing import Any


def main(server: str, model: str, text: str) -> None:
    wait_for(f"{server}/health")
    question = {"model": model, "prompt": text, "max_tokens": 16, "temperature": 0, "return_token_ids": True}
    (choice,) = answer(f"{server}/v1/completions", question)["choices"]
    print(f"{model} answered with {len(choice['token_ids'])} tokens: {choice['token_ids']}")


def wait_for(url: str, *, limit_s: float = 600.0) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            answer(url)
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(1)  # noqa: TID251 - a program of its own, which nobody can tell when the server is up
        else:
            return


def answer(url: str, question: dict[str, Any] | None = None) -> Any:
    data = json.dumps(question).encode() if question is not None else None
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        body = response.read()
    return json.loads(body) if body else None


if __name__ == "__main__":
    main(*sys.argv[1:])
