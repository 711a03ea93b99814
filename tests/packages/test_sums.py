"""Checksums, their signature and the bill of materials in build/packages/. `make packages-test` runs this."""

import hashlib
import json
import shutil
import unittest

from common import PACKAGES, ROOT, PackageTest, build, run


class Sums(PackageTest):
    def setUp(self):
        self.sums = self.folder / "SHA256SUMS"
        shutil.copy(PACKAGES / "SHA256SUMS", self.sums)

    def test_every_file_has_its_checksum(self):
        sums = dict(reversed(line.split("  ")) for line in self.sums.read_text().splitlines())
        files = [path for path in PACKAGES.iterdir() if not path.name.startswith("SHA256SUMS")]
        self.assertEqual(len(files), 4)
        self.assertEqual(sums, {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files})

    def test_a_signature_is_verified(self):
        key = self.folder / "key"
        self.succeed("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", key)
        build.sign(self.sums, key)
        build.sign(self.sums, key)
        signers = self.folder / "signers"
        signers.write_text(f"maintainers {key.with_suffix('.pub').read_text()}")
        verify = ("ssh-keygen", "-Y", "verify", "-f", signers, "-I", "maintainers", "-n", build.NAMESPACE, "-s", f"{self.sums}.sig")
        content = self.sums.read_text()
        self.assertEqual(run(*verify, input=content).returncode, 0)
        self.assertNotEqual(run(*verify, input=content.replace("0", "1")).returncode, 0)


class BillOfMaterials(PackageTest):
    def setUp(self):
        (path,) = PACKAGES.glob("*.cdx.json")
        self.document = json.loads(path.read_text())
        self.components = self.document["components"]

    def test_it_is_of_this_version(self):
        self.assertEqual((self.document["bomFormat"], self.document["specVersion"]), ("CycloneDX", "1.5"))
        self.assertEqual(self.document["metadata"]["component"]["version"], build.version())

    def test_it_has_the_crates_of_the_licence_notices(self):
        named = [(component["name"], component["version"]) for component in self.components]
        self.assertEqual(named, build.notices.linked_crates())
        self.assertGreater(len(named), 50)

    def test_checksums_are_those_of_the_lock_file(self):
        lock = (ROOT / "Cargo.lock").read_text()
        for component in self.components:
            (checksum,) = component["hashes"]
            self.assertIn(f'"{component["name"]}"\nversion = "{component["version"]}"\n', lock)
            self.assertIn(f'checksum = "{checksum["content"]}"', lock)

    def test_references_are_unique_and_known(self):
        references = [component["bom-ref"] for component in self.components]
        self.assertEqual(len(references), len(set(references)))
        (dependency,) = self.document["dependencies"]
        self.assertEqual(dependency["dependsOn"], references)
        self.assertEqual(dependency["ref"], self.document["metadata"]["component"]["bom-ref"])


if __name__ == "__main__":
    unittest.main()
