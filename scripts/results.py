"""Prints the results of scripts' checks, to be counted: one line each, and `N passed, M failed`."""


def told(results: list[tuple[str, str | None]]) -> bool:
    """Prints checks, each with its error, if any; returns whether any failed."""
    for name, wrong in results:
        print(f"{'ok    ' if wrong is None else 'FAILED'} {name}")
        if wrong:
            print("    " + wrong.strip().replace("\n", "\n    "))
    failed = sum(wrong is not None for _, wrong in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    return failed > 0
