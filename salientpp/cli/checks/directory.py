"""Check of a dataset directory or a converted graph, as ``salientpp info --verify`` does."""

from __future__ import annotations

from salientpp.cli.checks.finding import Finding, Machine


def check_directory(machine: Machine) -> Finding | None:
    """Compares every byte of the directory with its checksum."""
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
    except (ValueError, OSError) as error:
        problem = f"Replace the damaged files of {root}, or write the directory again: {error}."
        return Finding(f"{root} cannot be used", {"error": str(error)}, problems=[problem])
    size = sum(entry["bytes"] for entry in manifest["files"].values())
    values = {"kind": kind, "files": len(manifest["files"]), "bytes": size}
    return Finding(
        f"{kind}, {len(manifest['files'])} files, {size / 1e6:,.1f} MB; every byte matches its checksum", values
    )
