//! `terrace recover`, as a user runs it: after a process was killed that held acknowledged writes, they are in its file.
//! Every error says where the bytes are and what to do.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;

use terrace_memory::{Pager, Translation};
use terrace_pages::{BackingFile, Pages, PagesConfig};

const PAGE: u64 = 4096;
const REGION_PAGES: u64 = 600;
/// Each of these pages has been written, and none flushed.
const WRITTEN_PAGES: u64 = 100;
/// So much that no page is written back before the kill.
const BUDGET_BYTES: u64 = 32 << 20;
/// The environment variable that marks the process to be killed: the pool's name, and the files.
const CHILD: &str = "TERRACE_RECOVER_CHILD";

/// A process that holds acknowledged writes to some files, a directory for these, and a pool.
struct Holder {
    dir: tempfile::TempDir,
    pool: PathBuf,
    process: Child,
}

impl Holder {
    /// Starts a process that writes to files of these names.
    fn start(test: &str, files: &[&str]) -> Holder {
        Holder::start_in(tempfile::tempdir().unwrap(), test, files)
    }

    fn start_in(dir: tempfile::TempDir, test: &str, files: &[&str]) -> Holder {
        let name = format!("recover-{}-{test}", std::process::id());
        let paths: Vec<String> =
            files.iter().map(|file| dir.path().join(file).to_str().unwrap().to_owned()).collect();
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture"])
            .env(CHILD, format!("{name} {}", paths.join(" ")))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.as_mut().unwrap()).lines();
        assert!(lines.map(Result::unwrap).any(|line| line == "acknowledged"));
        Holder { dir, pool: Path::new("/dev/shm").join(format!("terrace-pages-{name}")), process }
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn lock_file(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!(".{name}.terrace-pages"))
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_file(&self.pool);
    }
}

fn content(page: u64) -> Vec<u8> {
    (page + 1).to_ne_bytes().repeat(512)
}

/// No test by itself: the process that [`Holder`] starts.
#[test]
fn child() {
    let Ok(child) = std::env::var(CHILD) else { return };
    let mut fields = child.split(' ');
    let pages = Pages::open(PagesConfig {
        directory: Some("/dev/shm".into()),
        ..PagesConfig::new(fields.next().unwrap(), BUDGET_BYTES)
    })
    .unwrap();
    let regions: Vec<_> = fields
        .map(|file| pages.add(BackingFile::open(file.as_ref(), Some(REGION_PAGES * PAGE)).unwrap()).unwrap())
        .collect();
    for region in &regions {
        for page in 0..WRITTEN_PAGES {
            let addr = Translation::range(&**region).addr + 3 * page * PAGE;
            let write = Pager::write(&**region, addr, &content(page), &(Arc::new(|| {}) as _)).unwrap();
            while write.outcome().is_none() {
                pages.advance();
            }
            write.outcome().unwrap().unwrap();
        }
    }
    println!("acknowledged");
    loop {
        std::thread::park();
    }
}

fn terrace(arguments: &[&Path]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_terrace")).arg("recover").args(arguments).output().unwrap()
}

/// What the command prints when it succeeds.
fn succeed(arguments: &[&Path]) -> String {
    let output = terrace(arguments);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The line of error with which the command fails.
fn fail(arguments: &[&Path]) -> String {
    let output = terrace(arguments);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.starts_with("terrace: ") && error.lines().count() == 1, "{error}");
    error
}

fn check_bytes(path: &Path) {
    let file = File::open(path).unwrap();
    for page in 0..WRITTEN_PAGES {
        let mut found = vec![0; PAGE as usize];
        file.read_exact_at(&mut found, 3 * page * PAGE).unwrap();
        assert!(found == content(page), "page {page} of {}", path.display());
        file.read_exact_at(&mut found, (3 * page + 1) * PAGE).unwrap();
        assert!(found == [0; PAGE as usize], "a page that was not written");
    }
}

#[test]
fn acknowledged_writes_of_a_killed_process_are_written_to_the_file() {
    let mut holder = Holder::start("one", &["region"]);
    let path = holder.file("region");
    let note = std::fs::read_to_string(holder.lock_file("region")).unwrap();
    assert!(note.starts_with(holder.pool.to_str().unwrap()), "{note}");
    assert!(note.contains(&format!("terrace recover {}", path.display())), "{note}");
    let process = format!("process {}, ", holder.process.id());
    let error = fail(&[&path]);
    assert!(error.contains("another server has it locked") && error.contains(&process), "{error}");
    let error = fail(&[&holder.pool]);
    assert!(error.contains("another server has it locked") && error.contains(&process), "{error}");
    holder.kill();
    let said = succeed(&[&path]);
    let written = format!("{}: {} pages of 4 KiB are written back", path.display(), WRITTEN_PAGES);
    assert!(said.starts_with(&written) && said.ends_with("(removed)\n"), "{said}");
    check_bytes(&path);
    assert!(!holder.pool.exists() && !holder.lock_file("region").exists());
    assert!(succeed(&[&path]).contains("nothing to recover: no pool has pages of it"));
}

#[test]
fn a_pool_is_recovered_with_all_of_its_files() {
    let mut holder = Holder::start("pool", &["a", "b", "gone"]);
    holder.kill();
    std::fs::remove_file(holder.file("gone")).unwrap();
    let output = terrace(&["--json".as_ref(), &holder.pool]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("100 pages of") && error.contains("there is no such file any more"), "{error}");
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["version"], 1);
    let files = &document["files"];
    for (index, name) in ["a", "b"].into_iter().enumerate() {
        assert_eq!(files[index]["path"], holder.file(name).to_str().unwrap(), "{files}");
        assert_eq!(files[index]["pages_written"], WRITTEN_PAGES, "{files}");
        assert_eq!(
            files[index]["pools"][0]["is_removed"], false,
            "the pool has pages of the third file: {files}"
        );
        check_bytes(&holder.file(name));
        assert!(!holder.lock_file(name).exists());
    }
    assert!(holder.pool.exists());
}

#[test]
fn a_file_that_was_moved_or_changed_is_found_by_its_identity() {
    let mut holder = Holder::start("moved", &["region"]);
    holder.kill();
    let file = File::options().write(true).open(holder.file("region")).unwrap();
    file.write_all_at(b"other", PAGE).unwrap();
    file.write_all_at(b"other", 5 * PAGE).unwrap();
    file.set_len(10 * PAGE + 1).unwrap();
    file.set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(60)).unwrap();
    let moved = holder.file("moved");
    std::fs::rename(holder.file("region"), &moved).unwrap();
    assert!(fail(&[&holder.pool]).contains("run `terrace recover` with the path that the file has now"));
    assert!(fail(&[&holder.file("region")]).contains("No such file"));
    let said = succeed(&[&moved]);
    assert!(said.contains("the file, its name or its permissions have changed"), "{said}");
    let bytes = std::fs::read(&moved).unwrap();
    assert_eq!((&bytes[..8], &bytes[5 * 4096..][..5]), (&content(0)[..8], &b"other"[..]));
    assert_eq!(bytes[297 * 4096..298 * 4096], content(99));
    assert!(!holder.pool.exists() && !holder.lock_file("region").exists());
}

#[test]
fn a_lost_pool_is_reported_until_the_lock_file_is_removed() {
    let mut holder = Holder::start("lost", &["region"]);
    holder.kill();
    // As a restart of the system does.
    std::fs::remove_file(&holder.pool).unwrap();
    let path = holder.file("region");
    for _ in 0..2 {
        let error = fail(&[&path]);
        assert!(error.contains("not flushed are lost") && error.contains(".region.terrace-pages"), "{error}");
    }
    std::fs::remove_file(holder.lock_file("region")).unwrap();
    assert!(succeed(&[&path]).contains("nothing to recover"));
}

#[test]
fn pools_of_other_users_are_not_used() {
    // Only root may give a file away.
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let mut holder = Holder::start("foreign", &["region"]);
    holder.kill();
    let other = nix::unistd::Uid::from_raw(12345);
    nix::unistd::chown(&holder.pool, Some(other), None).unwrap();
    let path = holder.file("region");
    let error = fail(&[&path]);
    assert!(
        error.contains("belongs to user 12345") && error.contains("run the command as user 12345"),
        "{error}"
    );
    // Nor does a pool that the file's directory does not name keep others from the file.
    std::fs::remove_file(holder.lock_file("region")).unwrap();
    let said = succeed(&[&path]);
    assert!(said.contains("nothing to recover") && said.contains("was not examined"), "{said}");
    // The file's owner may write what it likes to the file anyway.
    nix::unistd::chown(&path, Some(other), None).unwrap();
    succeed(&[&path]);
    check_bytes(&path);
}

#[test]
fn nothing_is_lost_when_the_disk_is_full() {
    let Some(disk) = SmallDisk::mount() else { return };
    let mut holder = Holder::start_in(tempfile::tempdir_in(&disk.0).unwrap(), "full", &["region"]);
    holder.kill();
    let filler = disk.0.join("filler");
    assert!(std::fs::write(&filler, vec![1; 4 << 20]).is_err(), "the disk is full");
    let path = holder.file("region");
    let error = fail(&[&path]);
    assert!(error.contains("cannot write 100 pages") && error.contains("No space left"), "{error}");
    assert!(error.contains("nothing is lost") && error.contains(holder.pool.to_str().unwrap()), "{error}");
    assert!(holder.pool.exists() && holder.lock_file("region").exists());
    std::fs::remove_file(filler).unwrap();
    succeed(&[&path]);
    check_bytes(&path);
}

/// A file system of 1 MiB, in memory. It is unmounted when this is dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    /// `None` if this user may not mount.
    fn mount() -> Option<SmallDisk> {
        let path = std::env::temp_dir().join(format!("terrace-recover-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=1M", "terrace-recover"])
            .arg(&path)
            .output();
        if !mount.is_ok_and(|mount| mount.status.success()) {
            std::fs::remove_dir(&path).unwrap();
            return None;
        }
        Some(SmallDisk(path))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// A file of a pool's name in the usual directory, where any user can make one. It is removed when this is dropped.
struct Decoy(PathBuf);

impl Decoy {
    fn new(name: &str) -> Decoy {
        Decoy(Path::new("/dev/shm").join(format!("terrace-pages-decoy-{}-{name}", std::process::id())))
    }
}

impl Drop for Decoy {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn a_pipe_with_the_name_of_a_pool_is_not_waited_for() {
    let pipe = Decoy::new("pipe");
    nix::unistd::mkfifo(&pipe.0, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(fail(&[&pipe.0]).contains("neither a regular file nor a block device"));
    let dir = tempfile::tempdir().unwrap();
    let region = dir.path().join("region");
    std::fs::write(&region, [0; PAGE as usize]).unwrap();
    assert!(succeed(&[&region]).contains("nothing to recover: no pool has pages of it"));
}

#[test]
fn a_file_with_the_name_of_a_pool_is_not_in_its_own_way() {
    let file = Decoy::new("file");
    std::fs::write(&file.0, [0; PAGE as usize]).unwrap();
    let said = succeed(&[&file.0]);
    let in_use = format!("{} is in use", file.0.display());
    assert!(said.contains("nothing to recover") && !said.contains(&in_use), "{said}");
}

#[test]
fn mistakes_get_one_line() {
    let dir = tempfile::tempdir().unwrap();
    assert!(fail(&[&dir.path().join("none")]).contains("No such file"));
    assert!(fail(&[dir.path()]).contains("cannot open"));
    assert!(fail(&["/dev/null".as_ref()]).contains("neither a regular file nor a block device"));
    let other_layout = dir.path().join("terrace-pages-other");
    let mut header = vec![0; 2 << 20];
    header[..8].copy_from_slice(b"TERRPAGE");
    header[8] = 99;
    std::fs::write(&other_layout, header).unwrap();
    std::fs::set_permissions(&other_layout, std::fs::Permissions::from_mode(0o600)).unwrap();
    assert!(fail(&[&other_layout]).contains("layout 99"));
    let without_a_path = Command::new(env!("CARGO_BIN_EXE_terrace")).arg("recover").output().unwrap();
    assert_eq!(without_a_path.status.code(), Some(2));
}
