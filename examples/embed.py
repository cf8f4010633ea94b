"""Streams an answer in your own process, and says where its time went.

python examples/embed.py [MODEL]
"""

import sys

from splittime import LLM, SamplingParams


def main() -> None:
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None)  # None: the model in the package
    for piece in llm.stream(["def read_json(path):"], SamplingParams(max_tokens=48, temperature=0.5, seed=1)):
        print(piece.text, end="", flush=True)
        if piece.output is not None:
            account = piece.output.account
    print(f"\n\n{account.output_tokens} tokens, {(account.end_ns - account.start_ns) / 1e6:.1f} ms:")
    for part in account.intervals:
        print(f"  {part.stage:10} {part.cause or '':16} {(part.end_ns - part.begin_ns) / 1e6:8.3f} ms")


if __name__ == "__main__":
    main()
