"""The licences of the crates that are linked into the command, the libraries and the Python module, with their texts."""

import json
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("terrace-cli", "terrace-ibverbs", "terrace-pager-preload", "terrace-python")
NAMES = re.compile(r"(licen[cs]e|copying|unlicense|notice)", re.IGNORECASE)


def cargo(*arguments):
    return subprocess.run(["cargo", *arguments, "--locked"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def linked_crates():
    """Name and version of each crate from a registry, including those that only generate code at build time."""
    selected = (argument for package in PACKAGES for argument in ("--package", package))
    tree = cargo("tree", "--edges", "normal", "--prefix", "none", "--format", "{p}", *selected)
    return sorted(set(re.findall(r"^(\S+) v(\S+)(?: \(proc-macro\))?(?: \(\*\))?$", tree, re.MULTILINE)))


def text():
    """Each crate with its licence, then each licence text once, with its crates."""
    packages = json.loads(cargo("metadata", "--format-version", "1"))["packages"]
    described = {(package["name"], package["version"]): package for package in packages}
    lines, owners = [], {}
    for crate in linked_crates():
        package = described[crate]
        name = " ".join(crate)
        lines.append(f"{name}: {package['license']}")
        folder = pathlib.Path(package["manifest_path"]).parent
        for path in sorted(folder.iterdir()):
            if NAMES.match(path.name) and path.is_file():
                owners.setdefault(path.read_text(errors="replace").strip(), []).append(name)
    texts = (f"{'=' * 80}\n{', '.join(names)}\n\n{licence}\n" for licence, names in owners.items())
    return ("The executables contain Rust's standard library (MIT OR Apache-2.0, https://www.rust-lang.org) and these crates:\n\n"
            + "\n".join(lines) + "\n\n" + "\n".join(texts))
