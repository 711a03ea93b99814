"""The crates that are linked into the packages, as a CycloneDX bill of materials.

cargo-cyclonedx lists one workspace member a file, development tools among its crates, and takes minutes to build. This lists the crates of
the licence notices, once.
"""

import json
import re

import notices

ROOT = notices.ROOT
FORMAT = "1.5"


def checksums():
    """The SHA-256 of each crate's archive, by name and version, as the lock file has them."""
    entry = re.compile(r'^name = "(.+)"\nversion = "(.+)"\nsource = ".+"\nchecksum = "(.+)"$', re.MULTILINE)
    return {(name, version): checksum for name, version, checksum in entry.findall((ROOT / "Cargo.lock").read_text())}


def purl(name, version):
    """A package URL. Its only reserved character in versions of crates is the plus sign."""
    return f"pkg:cargo/{name}@{version.replace('+', '%2B')}"


def component(name, version, package, checksum):
    return {
        "type": "library",
        "bom-ref": purl(name, version),
        "name": name,
        "version": version,
        "purl": purl(name, version),
        # Crates of before 2018 separate alternatives by a slash.
        "licenses": [{"expression": package["license"].replace("/", " OR ")}],
        "hashes": [{"alg": "SHA-256", "content": checksum}],
    }


def document(number):
    """The bill of materials of a version of Terrace."""
    packages = json.loads(notices.cargo("metadata", "--format-version", "1"))["packages"]
    described = {(package["name"], package["version"]): package for package in packages}
    hashes = checksums()
    crates = [component(*crate, described[crate], hashes[crate]) for crate in notices.linked_crates()]
    terrace = {"type": "application", "bom-ref": f"terrace@{number}", "name": "terrace", "version": number,
               "licenses": [{"expression": "MIT OR Apache-2.0"}]}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": FORMAT,
        "version": 1,
        "metadata": {"component": terrace},
        "components": crates,
        "dependencies": [{"ref": terrace["bom-ref"], "dependsOn": [crate["bom-ref"] for crate in crates]}],
    }


def text(number):
    return json.dumps(document(number), indent=2) + "\n"
