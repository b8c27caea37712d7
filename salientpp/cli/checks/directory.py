"""Check of a dataset directory or a converted graph, as ``salientpp info --verify`` does."""

from __future__ import annotations

from salientpp.cli.checks.finding import Finding, Machine


def check_directory(machine: Machine) -> Finding | None:
    """Checks every byte of the directory against the checksums in its manifest."""
    root = machine.directory
    if root is None:
        return None
    from salientpp.datasets.converted.directory import load_converted, read_converted
    from salientpp.store.directory.kinds import is_converted
    from salientpp.store.directory.load import load

    try:
        if is_converted(root):
            load_converted(root, verify=True)
            manifest, kind = read_converted(root), "converted graph"
        else:
            part = load(root, verify="full")
            manifest, kind = part.manifest, f"dataset directory of {part.num_parts} parts"
        size = sum(entry["bytes"] for entry in manifest["files"].values())
    except (ImportError, MemoryError):  # not of the directory
        raise
    except Exception as error:  # damage may have any other
        reason = str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
        problem = f"Replace the damaged files of {root}, or write the directory again: {reason}."
        return Finding(f"{root} cannot be used", {"error": reason}, problems=[problem])
    values = {"kind": kind, "files": len(manifest["files"]), "bytes": size}
    return Finding(
        f"{kind}, {len(manifest['files'])} files, {size / 1e6:,.1f} MB; every byte matches its checksum", values
    )
