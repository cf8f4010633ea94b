"""Whether the native kernels can be loaded here."""

from splittime.kernels.native.library import LibraryMissing, library


def has_native_kernels() -> bool:
    try:
        library()
    except LibraryMissing:
        return False
    return True
