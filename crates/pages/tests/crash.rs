//! A process that is killed loses no acknowledged write: the next one takes its frames over, or `recover` writes them
//! back.

mod common;

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use common::{PAGE, Scratch, Served, budget, pools};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use terrace_memory::Transfer;
use terrace_pages::{BackingFile, Pages, PagesConfig, PagesError, recover};

const REGION_PAGES: u64 = 1000;
const FRAMES: u64 = 256;
/// Not a divisor of the page size, so that many slots straddle pages.
const SLOT_BYTES: usize = 1560;
const SLOTS: usize = 2000;
/// The environment variable that marks the process to be killed: file, pool, seed and first version.
const CHILD: &str = "TERRACE_PAGES_CRASH_CHILD";

/// How often processes are killed: `TERRACE_ROUNDS`, or a few times.
fn rounds() -> u64 {
    std::env::var("TERRACE_ROUNDS").map_or(6, |rounds| rounds.parse().unwrap())
}

fn config(pool: &str) -> PagesConfig {
    PagesConfig { directory: Some(pools()), ..PagesConfig::new(pool, budget(FRAMES)) }
}

/// Writes until the process is killed, and prints each acknowledged write as a line `slot version`.
fn write_until_killed(served: &Served, seed: u64, first_version: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let mut version = first_version;
    let mut under_way: Vec<(usize, u64, Arc<dyn Transfer>)> = Vec::new();
    loop {
        let slot = random.random_range(0..SLOTS);
        if under_way.iter().all(|(other, ..)| *other != slot) {
            version += 1;
            let content = version.to_ne_bytes().repeat(SLOT_BYTES / 8);
            under_way.push((slot, version, served.begin_write((slot * SLOT_BYTES) as u64, &content)));
        }
        if under_way.len() == 8 {
            let (slot, version, transfer) = under_way.swap_remove(random.random_range(0..8));
            served.wait(&transfer).unwrap();
            std::io::stdout().write_all(format!("{slot} {version}\n").as_bytes()).unwrap();
        }
    }
}

/// No test by itself: the process that the other tests start with [`CHILD`] set.
#[test]
fn child() {
    let Ok(child) = std::env::var(CHILD) else { return };
    let fields: Vec<&str> = child.split(' ').collect();
    let pages = Pages::open(config(fields[1])).unwrap();
    let backing = BackingFile::open(fields[0].as_ref(), Some(REGION_PAGES * PAGE)).unwrap();
    let region = pages.add(backing).unwrap();
    let served = Served { region, pages, waker: Arc::new(|| {}), woken: Arc::default() };
    write_until_killed(&served, fields[2].parse().unwrap(), fields[3].parse().unwrap());
}

/// Starts a writing process, kills it after `count` acknowledged writes, and records them.
fn kill_after(count: usize, child: &str, acknowledged: &mut [u64]) {
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env(CHILD, child)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let mut note = |line: std::io::Result<String>| -> bool {
        let line = line.unwrap();
        let Some((slot, version)) = line.split_once(' ') else { return false };
        let (Ok(slot), Ok(version)) = (slot.parse::<usize>(), version.parse()) else { return false };
        acknowledged[slot] = version;
        true
    };
    let mut noted = 0;
    while noted < count {
        noted += usize::from(note(lines.next().expect("the process goes on")));
    }
    process.kill().unwrap();
    process.wait().unwrap();
    // Lines printed before the kill.
    lines.for_each(|line| _ = note(line));
}

fn check(acknowledged: &[u64], round: u64, mut read: impl FnMut(u64) -> Vec<u8>) {
    for (slot, version) in acknowledged.iter().enumerate() {
        for word in read((slot * SLOT_BYTES) as u64).chunks(8) {
            let word = u64::from_ne_bytes(word.try_into().unwrap());
            // Unacknowledged later writes may have been made.
            assert!(word >= *version, "slot {slot} in round {round}: {word} after {version}");
        }
    }
}

/// Checks what is in the region's file.
fn check_file(scratch: &Scratch, acknowledged: &[u64], round: u64) {
    let file = File::open(scratch.file()).unwrap();
    check(acknowledged, round, |offset| {
        let mut found = vec![0; SLOT_BYTES];
        file.read_exact_at(&mut found, offset).unwrap();
        found
    });
}

#[test]
fn the_next_process_takes_the_frames_over() {
    let scratch = Scratch::new("takeover");
    let pool = scratch.0.file_name().unwrap().to_str().unwrap().to_owned();
    let mut random = StdRng::seed_from_u64(1);
    let mut acknowledged = vec![0; SLOTS];
    for round in 0..rounds() {
        let child = format!("{} {pool} {round} {}", scratch.file().display(), round << 32);
        kill_after(random.random_range(1..1500), &child, &mut acknowledged);
        let served = Served::new(&scratch, config(&pool), None);
        let adopted = served.region.stats().pages_adopted;
        assert!(adopted > 0, "round {round}");
        check(&acknowledged, round, |offset| served.read(offset, SLOT_BYTES).unwrap());
        served.flush(0, REGION_PAGES * PAGE).unwrap();
        drop(served);
        check_file(&scratch, &acknowledged, round);
    }
}

#[test]
fn without_a_next_process_the_pages_are_recovered() {
    let scratch = Scratch::new("recover");
    let pool = scratch.0.file_name().unwrap().to_str().unwrap().to_owned();
    let mut acknowledged = vec![0; SLOTS];
    for round in 0..rounds() {
        let child = format!("{} {pool} {round} {}", scratch.file().display(), round << 32);
        kill_after(300, &child, &mut acknowledged);
        // Another pool does not have the newest bytes.
        let other = Pages::open(config(&format!("{pool}-other"))).unwrap();
        let refused = other.add(BackingFile::open(&scratch.file(), None).unwrap());
        assert!(matches!(refused, Err(PagesError::Elsewhere { .. })));
        drop(other);
        std::fs::remove_file(pools().join(format!("terrace-pages-{pool}-other"))).unwrap();
        let recovered = recover(&scratch.file(), Some(&pools()), &mut |_| {}).unwrap();
        assert!(recovered.pages_written > 0 && recovered.pools.len() == 1, "{recovered:?}");
        assert!(!recovered.pools[0].exists() && !scratch.0.join(".region.terrace-pages").exists());
        check_file(&scratch, &acknowledged, round);
    }
}

/// By links to the file and to its directory, and with an empty lock file, as a full disk left it.
#[test]
fn another_pool_is_refused_by_each_path_of_the_file() {
    let scratch = Scratch::new("linked");
    let pool = scratch.0.file_name().unwrap().to_str().unwrap().to_owned();
    let links = Scratch::new("links");
    std::os::unix::fs::symlink(scratch.file(), links.file()).unwrap();
    std::os::unix::fs::symlink(&scratch.0, links.0.join("directory")).unwrap();
    let mut acknowledged = vec![0; SLOTS];
    File::create(scratch.file()).unwrap();
    kill_after(300, &format!("{} {pool} 1 1", links.file().display()), &mut acknowledged);
    let other = Pages::open(config(&format!("{pool}-other"))).unwrap();
    let refuse = |path: &Path| {
        let refused = other.add(BackingFile::open(path, None).unwrap());
        assert!(matches!(refused, Err(PagesError::Elsewhere { .. })), "{path:?}: {refused:?}");
    };
    let (file, lock_file) = (scratch.file(), scratch.0.join(".region.terrace-pages"));
    for path in [&file, &links.file(), &links.0.join("directory/region")] {
        refuse(path);
    }
    std::fs::write(&lock_file, []).unwrap();
    refuse(&file);
    drop(other);
    std::fs::remove_file(pools().join(format!("terrace-pages-{pool}-other"))).unwrap();
    recover(&links.file(), Some(&pools()), &mut |_| {}).unwrap();
    assert!(!lock_file.exists());
    check_file(&scratch, &acknowledged, 0);
    std::fs::write(&lock_file, []).unwrap();
    let lost = recover(&file, Some(&pools()), &mut |_| {});
    assert!(matches!(lost, Err(PagesError::Lost { pool: None, .. })), "{lost:?}");
}

#[test]
fn a_pool_of_another_size_is_written_back_and_discarded() {
    let scratch = Scratch::new("resized");
    let pool = scratch.0.file_name().unwrap().to_str().unwrap().to_owned();
    let mut acknowledged = vec![0; SLOTS];
    let child = format!("{} {pool} 1 1", scratch.file().display());
    kill_after(500, &child, &mut acknowledged);
    let config = PagesConfig { budget_bytes: budget(2 * FRAMES), ..config(&pool) };
    let served = Served::new(&scratch, config, None);
    assert_eq!(served.region.stats().pages_adopted, 0);
    check(&acknowledged, 0, |offset| served.read(offset, SLOT_BYTES).unwrap());
}

#[test]
fn a_file_that_was_changed_meanwhile_is_read_again() {
    let scratch = Scratch::new("changed").with_numbered_pages(100);
    let served = Served::new(&scratch, scratch.config(128), None);
    for page in 0..50 {
        served.read(page * PAGE, 8).unwrap();
    }
    served.write(0, &[1; 8]).unwrap();
    drop(served);
    let served = Served::new(&scratch, scratch.config(128), None);
    assert_eq!(served.region.stats().pages_adopted, 50, "warm at once");
    assert_eq!(served.read(0, 8).unwrap(), [1; 8]);
    assert_eq!(served.region.stats().pages_read, 0);
    drop(served);
    // Later than our own last write by more than clocks may differ.
    let file = File::options().write(true).open(scratch.file()).unwrap();
    file.write_all_at(&[2; 8], 3 * PAGE).unwrap();
    let later = SystemTime::now() + Duration::from_secs(60);
    file.set_modified(later).unwrap();
    let served = Served::new(&scratch, scratch.config(128), None);
    assert_eq!(served.region.stats().pages_adopted, 0);
    assert_eq!(served.read(3 * PAGE, 8).unwrap(), [2; 8]);
}

/// As `cp -p` of a backup does: the file is the same one, and its times are of the past.
#[test]
fn a_file_that_was_restored_with_its_times_is_read_again() {
    let scratch = Scratch::new("restored").with_numbered_pages(100);
    let served = Served::new(&scratch, scratch.config(128), None);
    for page in 0..50 {
        served.read(page * PAGE, 8).unwrap();
    }
    drop(served);
    // Later than our own last write by more than clocks may differ.
    std::thread::sleep(Duration::from_millis(2200));
    let file = File::options().write(true).open(scratch.file()).unwrap();
    file.write_all_at(&[2; 8], 3 * PAGE).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(3600)).unwrap();
    let served = Served::new(&scratch, scratch.config(128), None);
    assert_eq!(served.region.stats().pages_adopted, 0);
    assert_eq!(served.read(3 * PAGE, 8).unwrap(), [2; 8]);
}

#[test]
fn regions_that_are_not_added_again_give_their_frames_up() {
    let scratch = Scratch::new("unclaimed").with_numbered_pages(200);
    let served = Served::new(&scratch, scratch.config(64), None);
    for page in 0..200 {
        served.read(page * PAGE, 8).unwrap();
    }
    drop(served);
    let other = Scratch::new("unclaimed-other").with_numbered_pages(200);
    let served = Served::new(&other, scratch.config(64), None);
    for page in 0..200 {
        assert_eq!(served.read(page * PAGE, 8).unwrap(), (page + 1).to_ne_bytes());
    }
    served.pages.discard_unclaimed();
    for page in 0..200 {
        assert_eq!(served.read(page * PAGE, 8).unwrap(), (page + 1).to_ne_bytes());
    }
}

/// A killed process leaves dirty pages of a file that is then deleted; another file takes its name, and perhaps its
/// number.
#[test]
fn pages_of_a_deleted_file_do_not_come_into_a_new_one() {
    let scratch = Scratch::new("deleted");
    let pool = scratch.0.file_name().unwrap().to_str().unwrap().to_owned();
    let mut acknowledged = vec![0; SLOTS];
    let child = format!("{} {pool} 1 1", scratch.file().display());
    kill_after(300, &child, &mut acknowledged);
    for _ in 0..3 {
        std::fs::remove_file(scratch.file()).unwrap();
        let file = File::create(scratch.file()).unwrap();
        file.set_len(REGION_PAGES * PAGE).unwrap();
    }
    let served = Served::new(&scratch, config(&pool), None);
    assert_eq!(served.region.stats().pages_adopted, 0);
    served.pages.discard_unclaimed();
    for page in 0..REGION_PAGES {
        assert_eq!(served.read(page * PAGE, 4096).unwrap(), [0; 4096], "page {page}");
    }
    served.flush(0, REGION_PAGES * PAGE).unwrap();
    assert!(std::fs::read(scratch.file()).unwrap().iter().all(|byte| *byte == 0));
}

/// The next server uses a longer part of the file than the killed one.
#[test]
fn pages_of_another_part_of_a_file_are_written_before_it_is_served() {
    let scratch = Scratch::new("longer");
    let pool = scratch.0.file_name().unwrap().to_str().unwrap().to_owned();
    let mut acknowledged = vec![0; SLOTS];
    let child = format!("{} {pool} 1 1", scratch.file().display());
    kill_after(300, &child, &mut acknowledged);
    let served = Served::new(&scratch, config(&pool), Some((REGION_PAGES + 10) * PAGE));
    assert_eq!(served.region.stats().pages_adopted, 0);
    check(&acknowledged, 0, |offset| served.read(offset, SLOT_BYTES).unwrap());
}
