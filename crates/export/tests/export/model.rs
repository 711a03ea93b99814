//! Random operations through the protocol have the results that the same operations have on a plain directory, also when
//! the server restarts in between.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};

use crate::support::{READ_WRITE, connect, server_config};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use terrace_export::{
    Client, ExportError, FileId, FileKind, OpenAccess, RemoteFile, RenameMode, Server, ServerConfig,
    SetAttributes,
};
use terrace_nic::PathChoice;

const NAMES: [&str; 4] = ["a", "b", "c", "d"];
const STEPS: usize = 400;
const LEN_MAX: u64 = 20_000;

/// An open file of both.
struct Opened {
    remote: RemoteFile,
    plain: fs::File,
}

/// The exported directory through a client, and a plain one.
struct Twins {
    rng: SmallRng,
    server: Option<Server>,
    config: ServerConfig,
    client: Client,
    exported: tempfile::TempDir,
    plain: tempfile::TempDir,
    opened: Vec<Opened>,
}

/// Error numbers, 0 for success.
fn remote<T>(result: Result<T, ExportError>) -> i32 {
    crate::support::errno(result)
}

fn local<T>(result: io::Result<T>) -> i32 {
    result.err().map_or(0, |error| error.raw_os_error().unwrap())
}

impl Twins {
    fn new(seed: u64) -> Twins {
        let (exported, plain) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut config = server_config(exported.path(), PathChoice::Udp);
        let server = Server::open(&config).unwrap();
        config.listen = server.address();
        let client = connect(server.address(), PathChoice::Udp);
        let rng = SmallRng::seed_from_u64(seed);
        Twins { rng, server: Some(server), config, client, exported, plain, opened: Vec::new() }
    }

    /// A path of up to three components.
    fn path(&mut self) -> PathBuf {
        let depth = self.rng.random_range(1..=3);
        (0..depth).map(|_| NAMES[self.rng.random_range(0..NAMES.len())]).collect()
    }

    /// The directory of a path, component by component, and the last name.
    fn parent(&self, path: &Path) -> Result<(FileId, PathBuf), ExportError> {
        let mut at = self.client.root();
        for name in path.parent().into_iter().flat_map(Path::iter) {
            let found = self.client.lookup(at, name)?;
            if found.kind != FileKind::Directory {
                // Where the kernel resolves two paths, it comes to the second one only if the first is valid.
                return Err(ExportError::Os(Errno::NOTDIR.raw_os_error()));
            }
            at = found.id;
        }
        Ok((at, path.file_name().unwrap().into()))
    }

    fn file(&self, path: &Path) -> Result<FileId, ExportError> {
        let (parent, name) = self.parent(path)?;
        Ok(self.client.lookup(parent, name.as_ref())?.id)
    }

    /// Whether a path leads through a symbolic link, which local calls follow.
    fn follows_link(&self, path: &Path) -> bool {
        let directories = path.ancestors().skip(1);
        directories.filter(|at| !at.as_os_str().is_empty()).any(|at| self.plain.path().join(at).is_symlink())
    }

    fn step(&mut self) {
        let (path, to) = (self.path(), self.path());
        if self.follows_link(&path) || self.follows_link(&to) {
            return;
        }
        let (plain, plain_to) = (self.plain.path().join(&path), self.plain.path().join(&to));
        let at = |twins: &Twins| twins.parent(&path);
        let client = self.client.clone();
        let (remote, local, what) = match self.rng.random_range(0..16) {
            0 | 1 => {
                let exclusive = self.rng.random_bool(0.5) || plain.is_symlink();
                let made = at(self).and_then(|(parent, name)| {
                    client.create(parent, name.as_ref(), 0o644, READ_WRITE, exclusive)
                });
                let mut options = fs::File::options();
                options.read(true).write(true).create(true).create_new(exclusive);
                let plain = options.open(&plain);
                let results = (
                    remote(made.as_ref().map(|_| ()).map_err(clone)),
                    local(plain.as_ref().map(|_| ()).map_err(same)),
                    "create",
                );
                if let (Ok(remote), Ok(plain)) = (made, plain) {
                    self.opened.push(Opened { remote, plain });
                }
                results
            }
            2 | 3 => {
                let made =
                    at(self).and_then(|(parent, name)| client.make_directory(parent, name.as_ref(), 0o755));
                (remote(made), local(fs::create_dir(&plain)), "mkdir")
            }
            4 => {
                let removed = at(self).and_then(|(parent, name)| client.unlink(parent, name.as_ref()));
                (remote(removed), local(fs::remove_file(&plain)), "unlink")
            }
            5 => {
                let removed =
                    at(self).and_then(|(parent, name)| client.remove_directory(parent, name.as_ref()));
                (remote(removed), local(fs::remove_dir(&plain)), "rmdir")
            }
            6 | 7 => {
                let (mode, flags) = match self.rng.random_range(0..3) {
                    0 => (RenameMode::Replace, RenameFlags::empty()),
                    1 => (RenameMode::NoReplace, RenameFlags::NOREPLACE),
                    _ => (RenameMode::Exchange, RenameFlags::EXCHANGE),
                };
                let renamed = at(self).and_then(|(parent, name)| {
                    let (new_parent, new_name) = self.parent(&to)?;
                    client.rename(parent, name.as_ref(), new_parent, new_name.as_ref(), mode)
                });
                let plain = renameat_with(CWD, &plain, CWD, &plain_to, flags);
                (remote(renamed), local(plain.map_err(io::Error::from)), "rename")
            }
            8 => {
                let linked = self.file(&path).and_then(|id| {
                    let (parent, name) = self.parent(&to)?;
                    client.link(id, parent, name.as_ref())
                });
                (remote(linked), local(fs::hard_link(&plain, &plain_to)), "link")
            }
            9 => {
                let made =
                    at(self).and_then(|(parent, name)| client.symlink(parent, name.as_ref(), "x".as_ref()));
                (remote(made), local(symlink("x", &plain)), "symlink")
            }
            10 => {
                let len = self.rng.random_range(0..LEN_MAX);
                let set = SetAttributes { len: Some(len), ..SetAttributes::default() };
                let cut = self.file(&path).and_then(|id| client.set_attributes(id, &set));
                let options = fs::File::options().write(true).open(&plain).and_then(|file| file.set_len(len));
                // A symbolic link is not followed, and leads to nothing.
                let is_link = plain.is_symlink();
                let remote = remote(cut);
                if is_link { (0, 0, "truncate") } else { (remote, local(options), "truncate") }
            }
            11 => {
                let found =
                    self.file(&path).and_then(|id| client.open(id, OpenAccess::READ | OpenAccess::WRITE));
                let options = fs::File::options().read(true).write(true).open(&plain);
                if plain.is_symlink() {
                    (0, 0, "open")
                } else {
                    let results = (
                        remote(found.as_ref().map(|_| ()).map_err(clone)),
                        local(options.as_ref().map(|_| ()).map_err(same)),
                        "open",
                    );
                    if let (Ok(remote), Ok(plain)) = (found, options) {
                        self.opened.push(Opened { remote, plain });
                    }
                    results
                }
            }
            12 if self.rng.random_bool(0.2) => {
                self.restart();
                return;
            }
            _ => {
                self.access();
                return;
            }
        };
        assert_eq!(remote, local, "{what} {} {}", path.display(), to.display());
    }

    /// Reads, writes or closes an open file.
    fn access(&mut self) {
        if self.opened.is_empty() {
            return;
        }
        let index = self.rng.random_range(0..self.opened.len());
        let offset = self.rng.random_range(0..LEN_MAX);
        let mut bytes = vec![self.rng.random(); self.rng.random_range(1..5000)];
        let Opened { remote, plain } = &self.opened[index];
        match self.rng.random_range(0..5) {
            0 => {
                remote.write_at(offset, &bytes).unwrap();
                plain.write_all_at(&bytes, offset).unwrap();
            }
            1 => {
                let at = remote.append(&bytes).unwrap();
                assert_eq!(at, plain.metadata().unwrap().len());
                plain.write_all_at(&bytes, at).unwrap();
            }
            2 => {
                remote.truncate(offset).unwrap();
                plain.set_len(offset).unwrap();
            }
            3 => {
                let mut expected = bytes.clone();
                let count = remote.read_at(offset, &mut bytes).unwrap();
                assert_eq!(count, plain.read_at(&mut expected, offset).unwrap());
                assert!(bytes[..count] == expected[..count]);
            }
            _ => self.opened.remove(index).remote.close().unwrap(),
        }
    }

    /// Ends the server, and starts another one. Files without a name do not survive that.
    fn restart(&mut self) {
        use std::os::unix::fs::MetadataExt;
        self.opened.retain(|opened| opened.plain.metadata().unwrap().nlink() > 0);
        drop(self.server.take());
        self.server = Some(Server::open(&self.config).unwrap());
        // Calls that may not be repeated would fail if the client had not noticed yet.
        self.client.attributes(self.client.root()).unwrap();
    }

    /// All names, with their kinds and contents.
    fn tree(root: &Path) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
        let (mut found, mut left) = (BTreeMap::new(), vec![root.to_path_buf()]);
        while let Some(directory) = left.pop() {
            for entry in fs::read_dir(directory).unwrap() {
                let (path, kind) = entry.map(|entry| (entry.path(), entry.file_type().unwrap())).unwrap();
                let contents = kind.is_file().then(|| fs::read(&path).unwrap());
                if kind.is_dir() {
                    left.push(path.clone());
                }
                found.insert(path.strip_prefix(root).unwrap().into(), contents);
            }
        }
        found
    }
}

fn clone(error: &ExportError) -> ExportError {
    ExportError::Os(error.errno())
}

fn same(error: &io::Error) -> io::Error {
    io::Error::from_raw_os_error(error.raw_os_error().unwrap())
}

fn results_are_those_of_a_plain_directory(seed: u64) {
    let mut twins = Twins::new(seed);
    for step in 0..STEPS {
        twins.step();
        if step % 50 == 0 {
            assert!(Twins::tree(twins.exported.path()) == Twins::tree(twins.plain.path()), "seed {seed}");
        }
    }
    assert!(Twins::tree(twins.exported.path()) == Twins::tree(twins.plain.path()), "seed {seed}");
    // The names through the protocol are those of the directory.
    let page = twins.client.read_directory(twins.client.root(), 0, true).unwrap();
    let mut names: Vec<_> = page.entries.into_iter().map(|entry| entry.name.0).collect();
    names.sort();
    let plain = fs::read_dir(twins.plain.path()).unwrap();
    let mut expected: Vec<_> = plain.map(|entry| entry.unwrap().file_name().into_encoded_bytes()).collect();
    expected.sort();
    assert_eq!(names, expected);
}

#[test]
fn results_are_those_of_a_plain_directory_1() {
    results_are_those_of_a_plain_directory(1);
}

#[test]
fn results_are_those_of_a_plain_directory_2() {
    results_are_those_of_a_plain_directory(2);
}

#[test]
fn results_are_those_of_a_plain_directory_3() {
    results_are_those_of_a_plain_directory(3);
}

#[test]
fn long_directories_are_read_in_pages() {
    let twins = Twins::new(0);
    for number in 0..1000 {
        fs::write(twins.exported.path().join(format!("a-file-with-a-name-{number:04}")), "").unwrap();
    }
    let (mut names, mut cookie, mut pages) = (Vec::new(), 0, 0);
    loop {
        let page = twins.client.read_directory(twins.client.root(), cookie, true).unwrap();
        names.extend(page.entries.into_iter().map(|entry| entry.name.0));
        pages += 1;
        match page.next {
            Some(next) => cookie = next,
            None => break,
        }
    }
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 1000);
    assert!(pages > 1);
}
